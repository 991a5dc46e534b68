// sbtrain export: a checkpoint's model as a Hugging Face folder.

#include <memory>

#include "cli/cli.h"
#include "cli/run_tokenizer.h"
#include "config/stored_config.h"
#include "core/log.h"
#include "export/hf_export.h"
#include "export/verify_export.h"

namespace sbtrain {

enum class ExportType : uint8_t { kF32, kBf16, kF16 };
template <>
inline constexpr auto kNames<ExportType> = enum_names<ExportType>({{ExportType::kF32, "f32"},
                                                                   {ExportType::kBf16, "bf16"},
                                                                   {ExportType::kF16, "f16"}});

namespace {

struct ExportOptions {
  std::string checkpoint;
  std::string output;
  std::string tokenizer;
  ExportFormat format = ExportFormat::kHf;
  ExportType dtype = ExportType::kF32;
  double shard_gb = 5;
  bool ema = false;
  bool verify = false;
};

FileDType file_type(ExportType type) {
  if (type == ExportType::kBf16) return FileDType::kBF16;
  return type == ExportType::kF16 ? FileDType::kF16 : FileDType::kF32;
}

void export_checkpoint(const ExportOptions& options, const CheckpointReader& checkpoint) {
  const Config config = stored_config(checkpoint);
  const FileDType dtype = file_type(options.dtype);
  const HfLayout layout = hf_layout(config, options.format, dtype);
  const TrainingText text = training_text(checkpoint);
  const std::string tokenizer = run_tokenizer(checkpoint, config, options.tokenizer);
  if (!tokenizer.empty()) check_tokenizer(Tokenizer(tokenizer), text);
  if (options.verify) check_verify_packages(layout);
  std::string verified;
  export_hf(checkpoint, config, layout,
            {.output = options.output,
             .dtype = dtype,
             .tokenizer = tokenizer,
             .tokenizer_hash = text.tokenizer_hash,
             .starts_with_bos = text.starts_with_bos,
             .average = options.ema,
             .shard_bytes = static_cast<uint64_t>(options.shard_gb * 1e9),
             .check = [&](const std::filesystem::path& folder) {
               if (!options.verify) return;
               verified = verify_export(folder, checkpoint, config, layout, dtype);
             }});
  fmt::print("{}: step {} as {}, {}\n", options.output, checkpoint.manifest().step,
             layout.architecture, torch_dtype_name(dtype));
  if (tokenizer.empty()) fmt::print("no tokenizer: the run has none; --tokenizer names one\n");
  if (!verified.empty()) fmt::print("verified: {}\n", verified);
}

ExitCode run_export(const ExportOptions& options) {
  check_export_output(options.output, options.checkpoint);
  // The weights are verified as they are read, so that each byte is read once. An export of damaged
  // ones leaves nothing behind, and the next older checkpoint of the run is exported.
  open_checkpoint(options.checkpoint, [&](const CheckpointReader& checkpoint) {
    if (!options.ema) return export_checkpoint(options, checkpoint);
    CheckpointReader average(checkpoint.folder(), Verification::kOnRead);
    average.use_average();
    export_checkpoint(options, average);
  });
  return ExitCode::kDone;
}

}  // namespace

void add_export(Command app, Action& action) {
  auto options = std::make_shared<ExportOptions>();
  Command command = app.add_subcommand("export", "Write a trained model as a Hugging Face folder");
  command.add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint").required();
  command.add_option("--output", options->output, "New folder").required();
  command.add_choice(
      "--format", options->format,
      "hf: Llama, Granite, Mistral, SmolLM3, Qwen, OLMo 2, GPT-NeoX or GPT-2 where the model is "
      "one, otherwise with Python code of its own; fla: flash-linear-attention's stick-breaking "
      "model");
  command.add_choice("--dtype", options->dtype, "Type of the stored weights");
  command.add_option("--tokenizer", options->tokenizer,
                     "Tokenizer of the training data; default: the run's");
  command.add_option("--shard-gb", options->shard_gb, "Size of a weights file, in GB")
      .check(in_range(1e-6, 1e6))
      .capture_default_str();
  command.add_flag("--ema", options->ema,
                   "The average of the weights that the run keeps (train.ema), in their place");
  command.add_flag("--verify", options->verify,
                   "Compare the logits of the export with the checkpoint's; needs PyTorch and "
                   "transformers, and memory for two copies of the model in f32");
  command.callback([options, &action] { action = [options] { return run_export(*options); }; });
}

}  // namespace sbtrain
