// The GPUs of this machine, among which the ranks of a job choose.
#pragma once

#include <string>

namespace sbtrain {

// GPUs that this process sees (CUDA_VISIBLE_DEVICES); 0 without a driver or in a build for CPUs.
int visible_gpus();

// Makes the calling thread work on a GPU, 0 <= index < visible_gpus(). Threads that it has started
// before, and those that it starts later, have to call it themselves; use_chosen_gpu() does it with
// the index of the last call. Throws ExitCode::kInternal.
void choose_gpu(int index);
void use_chosen_gpu();
int chosen_gpu();  // the index of the last call, or 0

// Whether there are several visible GPUs and NVLink connects every one of them with every other, so
// that their copy engines reach each other's memory.
bool nvlink_connects_gpus();

// "NVIDIA H200", and a name that no other GPU of this machine has. Empty in a build for CPUs.
std::string gpu_name(int index);
std::string gpu_address(int index);

// The newest CUDA that the driver supports, "13.0"; empty without a driver or in a build for CPUs.
std::string cuda_of_driver();

}  // namespace sbtrain
