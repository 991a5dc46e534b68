// The functions of MPI, whose library is loaded by the first communicator between ranks on the CPU.
#pragma once

// Without the C++ classes that MPI once had, which mpi.h would include.
#define OMPI_SKIP_MPICXX 1   // NOLINT: Open MPI's name
#define MPICH_SKIP_MPICXX 1  // NOLINT: MPICH's
#include <mpi.h>

#include "core/shared_library.h"

namespace sbtrain {

#define SBTRAIN_MPI_FUNCTIONS(F) \
  F(Comm_rank)                   \
  F(Comm_set_errhandler)         \
  F(Comm_size)                   \
  F(Error_string)                \
  F(Finalize)                    \
  F(Get_library_version)         \
  F(Init_thread)                 \
  F(Initialized)                 \
  F(Irecv)                       \
  F(Isend)                       \
  F(Testall)

// mpi().Isend is MPI_Isend, and so on.
struct MpiFunctions {
// A name cannot stand in parentheses where it is declared.
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define SBTRAIN_MEMBER(name) decltype(&::MPI_##name) name = nullptr;
  SBTRAIN_MPI_FUNCTIONS(SBTRAIN_MEMBER)
#undef SBTRAIN_MEMBER
  // MPI_COMM_WORLD, MPI_BYTE and MPI_ERRORS_RETURN, which in Open MPI are addresses of the
  // library's variables, so that naming them would link it.
  MPI_Comm comm_world{};
  MPI_Datatype byte{};
  MPI_Errhandler errors_return{};
};

// Throws ExitCode::kConfig, saying what to install, where the library is missing.
const MpiFunctions& mpi();

}  // namespace sbtrain
