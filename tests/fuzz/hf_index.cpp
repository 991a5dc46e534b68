// model.safetensors.index.json of a Hugging Face folder, beside two files of weights. Every tensor
// of a folder that is accepted can be read, and lies in the folder.
#include <cstdlib>
#include <fstream>
#include <vector>

#include "export/hf_folder.h"
#include "fuzz/harness.h"

namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = R"({"model_type": "sbtrain", "sbtrain":
    {"layers": 1, "width": 2, "inner": 2, "heads": 1, "vocab": 2, "mlp": "none"}})";

void write(const fs::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

// A file of weights with these tensors of two elements.
void write_weights(const fs::path& path, const std::vector<std::string>& names) {
  std::string header;
  size_t end = 0;
  for (const std::string& name : names) {
    header += (end == 0 ? "{\"" : ",\"") + name +
              R"(":{"dtype":"F32","shape":[2],"data_offsets":[)" + std::to_string(end) + "," +
              std::to_string(end + 8) + "]}";
    end += 8;
  }
  header += "}";
  while (header.size() % 8 != 0) header += ' ';
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  write(path, file + header + std::string(end, '\x3f'));
}

// A folder that lasts as long as the program.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "hf_index_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
    write(path_ / "config.json", kConfig);
    write_weights(path_ / "a.safetensors", {"model.norm.weight", "b"});
    write_weights(path_ / "b.safetensors", {"c"});
  }
  ~Folder() {
    std::error_code none;
    fs::remove_all(path_, none);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  static const Folder kFolder;
  write(kFolder.path() / "model.safetensors.index.json",
        {reinterpret_cast<const char*>(data), size});
  test::may_refuse([&] {
    const HfFolder folder(kFolder.path());
    for (const std::string& name : folder.names()) {
      float values[2] = {};
      if (folder.shape(name) != std::vector<int64_t>{2}) std::abort();
      folder.read(name, 0, 2, values);
    }
  });
  return 0;
}
