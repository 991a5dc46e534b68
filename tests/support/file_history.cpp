#include "support/file_history.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "support/process.h"

namespace sbtrain::test {

namespace fs = std::filesystem;

std::vector<RecordedOperation> read_history(const fs::path& file) {
  const std::string bytes = read_file(file);
  std::vector<RecordedOperation> history;
  for (size_t at = 0; at < bytes.size();) {
    OperationHead head;
    std::memcpy(&head, bytes.data() + at, sizeof(head));
    at += sizeof(head);
    history.push_back({.operation = head.operation,
                       .inode = head.inode,
                       .number = head.number,
                       .first = bytes.substr(at, head.first),
                       .second = bytes.substr(at + head.first, head.second)});
    at += head.first + head.second;
  }
  return history;
}

RecordedFiles::RecordedFiles(const fs::path& root) {
  struct stat status {};
  if (::stat(root.c_str(), &status) != 0) throw std::runtime_error("no folder " + root.string());
  nodes_.push_back({.folder = true});
  by_inode_[status.st_ino] = 0;
}

size_t RecordedFiles::find(const fs::path& path) const {
  size_t node = 0;
  for (const fs::path& name : path) node = nodes_[node].names.at(name.string());
  return node;
}

std::map<std::string, size_t>& RecordedFiles::names_beside(const std::string& path) {
  return nodes_[find(fs::path(path).parent_path())].names;
}

void RecordedFiles::add(const RecordedOperation& operation, bool folder) {
  // The system gives the inodes of removed files to new ones.
  by_inode_[operation.inode] = nodes_.size();
  const std::string name = fs::path(operation.first).filename().string();
  names_beside(operation.first)[name] = nodes_.size();
  nodes_.push_back({.folder = folder});
}

void RecordedFiles::apply(const RecordedOperation& o) {
  const auto name = [](const std::string& path) { return fs::path(path).filename().string(); };
  const auto open = by_inode_.find(o.inode);
  switch (o.operation) {
    case FileOperation::kCreate:
      return add(o, /*folder=*/false);
    case FileOperation::kMakeFolder:
      return add(o, /*folder=*/true);
    case FileOperation::kWrite: {
      std::string& data = nodes_[open->second].data;
      data.resize(std::max(data.size(), o.number + o.first.size()));
      data.replace(o.number, o.first.size(), o.first);
      return;
    }
    case FileOperation::kResize:
      nodes_[open->second].data.resize(o.number);
      return;
    case FileOperation::kFlush:
      if (open == by_inode_.end()) return;  // of a file elsewhere
      nodes_[open->second].flushed = nodes_[open->second].data;
      nodes_[open->second].flushed_names = nodes_[open->second].names;
      return;
    case FileOperation::kRename: {
      const size_t moved = find(o.first);
      names_beside(o.first).erase(name(o.first));
      names_beside(o.second)[name(o.second)] = moved;
      return;
    }
    case FileOperation::kExchange:
      std::swap(names_beside(o.first).at(name(o.first)), names_beside(o.second).at(name(o.second)));
      return;
    case FileOperation::kRemove:
      names_beside(o.first).erase(name(o.first));
      return;
  }
}

void RecordedFiles::write(const fs::path& target, Survival survival) const {
  write(0, target, survival);
}

void RecordedFiles::write(size_t node, const fs::path& target, Survival survival) const {
  const Node& n = nodes_[node];
  if (n.folder) {
    fs::create_directory(target);
    const auto& names = survival == Survival::kNothing ? n.flushed_names : n.names;
    for (const auto& [name, inner] : names) write(inner, target / name, survival);
    return;
  }
  std::string data = survival == Survival::kAll ? n.data : n.flushed;
  if (survival == Survival::kNames) data.resize(n.data.size(), '\0');
  write_file(target, data);
}

std::string RecordedFiles::content(const std::string& path) const {
  try {
    return nodes_[find(path)].data;
  } catch (const std::out_of_range&) {
    return "";
  }
}

bool RecordedFiles::is(const std::string& path, uint64_t inode) const {
  try {
    const auto open = by_inode_.find(inode);
    return open != by_inode_.end() && open->second == find(path);
  } catch (const std::out_of_range&) {
    return false;
  }
}

}  // namespace sbtrain::test
