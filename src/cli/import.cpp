// sbtrain import: a Hugging Face folder as a run folder with a checkpoint.
#include <memory>

#include "cli/cli.h"
#include "export/hf_export.h"
#include "export/hf_import.h"

namespace sbtrain {
namespace {

struct ImportOptions {
  std::string input;
  std::string output;
  bool without_tokenizer = false;
};

ExitCode run_import(const ImportOptions& options) {
  check_export_output(options.output, options.input);
  const HfFolder folder(options.input);
  const HfImport imported = import_hf(folder, options.output, !options.without_tokenizer);
  fmt::print("{}: {}, {} tensors\n", imported.checkpoint.string(), folder.architecture(),
             folder.names().size());
  if (!imported.has_tokenizer) {
    fmt::print("no tokenizer: generate and eval need one with --tokenizer\n");
  }
  return ExitCode::kDone;
}

}  // namespace

void add_import(Command app, Action& action) {
  auto options = std::make_shared<ImportOptions>();
  Command command = app.add_subcommand("import", "Turn a Hugging Face folder into a run folder");
  command
      .add_option(
          "--input", options->input,
          "Folder with config.json and safetensors: Llama, Granite, Mistral, SmolLM2, "
          "SmolLM3, Qwen2, Qwen2.5, Qwen3, OLMo 2, GPT-NeoX, GPT-2, flash-linear-attention's "
          "stick-breaking model, or what sbtrain export has written")
      .required();
  command.add_option("--output", options->output, "New run folder").required();
  command.add_flag("--without-tokenizer", options->without_tokenizer,
                   "Leave the folder's tokenizer out, such as one that sbtrain cannot compute");
  command.callback([options, &action] { action = [options] { return run_import(*options); }; });
}

}  // namespace sbtrain
