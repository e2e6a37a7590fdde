// Runs a network of a bundle whose parts are AOTInductor libraries, without Python. Needs libtorch.
//
//     Bundle bundle("app.asb", "mlp");
//     std::vector<at::Tensor> outputs = bundle.run(inputs);
//
// `table.txt` is the table of the parts. The weights are mapped and read where they lie.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

struct Spec {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  // of a weight, in bytes from the start of the weights file
  std::vector<int64_t> shape, stride;

  int64_t extent() const {
    int64_t last = 0;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      if (shape[dim] == 0) return 0;
      last += (shape[dim] - 1) * stride[dim];
    }
    return last + 1;
  }
};

struct Part {
  std::string library;
  int threads = 1;
  std::vector<Spec> weights;
  std::vector<std::string> inputs, outputs;
  std::unordered_map<std::string, at::Tensor> constants;  // the library does not own them
  std::unique_ptr<torch::inductor::AOTIModelContainerRunnerCpu> runner;
};

class Bundle {
 public:
  Bundle(const std::string& folder, const std::string& network) : folder_(folder) {
    read_table(network);
    map_weights();
    for (auto& part : parts_) load(part);
  }
  Bundle(const Bundle&) = delete;
  Bundle& operator=(const Bundle&) = delete;
  ~Bundle() {
    parts_.clear();
    if (data_ != nullptr) munmap(data_, size_);
  }

  const std::vector<Spec>& inputs() const { return inputs_; }

  // One request: the inputs in the order of the table, the outputs in the order of the model.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    if (inputs.size() != inputs_.size()) throw std::runtime_error("the network takes " + std::to_string(inputs_.size()) + " inputs");
    std::map<std::string, at::Tensor> values;
    for (size_t k = 0; k < inputs.size(); ++k) {
      const Spec& spec = inputs_[k];
      if (inputs[k].sizes() != at::IntArrayRef(spec.shape) || inputs[k].scalar_type() != spec.dtype)
        throw std::runtime_error("input '" + spec.name + "' has another shape or dtype than the bundle was made for");
      values[spec.name] = at::empty_strided(spec.shape, spec.stride, spec.dtype).copy_(inputs[k]);
    }
    for (auto& part : parts_) {
      std::vector<at::Tensor> given;
      for (const auto& name : part.inputs) given.push_back(values.at(name));
      at::set_num_threads(part.threads);
      std::vector<at::Tensor> made = part.runner->run(given);
      for (size_t k = 0; k < made.size(); ++k) values[part.outputs.at(k)] = made[k];
    }
    std::vector<at::Tensor> found;
    for (const auto& name : outputs_) found.push_back(values.at(name));
    return found;
  }

 private:
  static at::ScalarType dtype_of(const std::string& name) {
    static const std::map<std::string, at::ScalarType> known = {
        {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
        {"int64", at::kLong},    {"int32", at::kInt},      {"int16", at::kShort},  {"int8", at::kChar},
        {"uint8", at::kByte},    {"bool", at::kBool}};
    auto found = known.find(name);
    if (found == known.end()) throw std::runtime_error("the table has dtype '" + name + "', which this driver does not know");
    return found->second;
  }

  static Spec read_spec(std::istringstream& line) {
    Spec spec;
    std::string dtype;
    size_t dims = 0;
    line >> spec.name >> dtype >> spec.offset >> dims;
    if (!line || dims > 64) throw std::runtime_error("the table is damaged at '" + spec.name + "'");
    spec.dtype = dtype_of(dtype);
    spec.shape.resize(dims);
    spec.stride.resize(dims);
    for (auto& size : spec.shape) line >> size;
    for (auto& step : spec.stride) line >> step;
    if (!line) throw std::runtime_error("the table is damaged at '" + spec.name + "'");
    return spec;
  }

  void read_table(const std::string& network) {
    std::ifstream file(folder_ + "/table.txt");
    std::string text, here;
    if (!std::getline(file, text) || text != "autosplit bundle 1")
      throw std::runtime_error("'" + folder_ + "/table.txt' is missing, or of another version than 1");
    bool whole = false;
    while (std::getline(file, text)) {
      std::istringstream line(text);
      std::string kind, rest;
      line >> kind;
      whole = kind == "end";
      if (kind == "network") {
        std::getline(line >> std::ws, here);
      } else if (here != network) {
        continue;
      } else if (kind == "input") {
        inputs_.push_back(read_spec(line));
      } else if (kind == "output") {
        line >> rest;
        outputs_.push_back(rest);
      } else if (kind == "part") {
        parts_.emplace_back();
        line >> parts_.back().library >> parts_.back().threads;
        if (parts_.back().library.find('/') != std::string::npos) throw std::runtime_error("a library lies outside of the bundle");
      } else if (!parts_.empty() && kind == "weight") {
        parts_.back().weights.push_back(read_spec(line));
      } else if (!parts_.empty() && (kind == "reads" || kind == "makes")) {
        line >> rest;
        (kind == "reads" ? parts_.back().inputs : parts_.back().outputs).push_back(rest);
      }
    }
    if (!whole) throw std::runtime_error("'" + folder_ + "/table.txt' is truncated");
    if (parts_.empty()) throw std::runtime_error("the bundle has no network '" + network + "' of AOTInductor parts");
  }

  void map_weights() {
    const std::string path = folder_ + "/weights.safetensors";
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat facts {};
    if (fd < 0 || fstat(fd, &facts) != 0) throw std::runtime_error("'" + path + "' cannot be read");
    size_ = static_cast<size_t>(facts.st_size);
    data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      throw std::runtime_error("'" + path + "' cannot be mapped");
    }
  }

  void load(Part& part) {
    std::unordered_map<std::string, at::Tensor> weights;
    for (const auto& spec : part.weights) {
      const int64_t num_bytes = spec.extent() * static_cast<int64_t>(at::elementSize(spec.dtype));
      if (spec.offset < 0 || spec.offset + num_bytes > static_cast<int64_t>(size_))
        throw std::runtime_error("weight '" + spec.name + "' lies outside of the weights file");
      weights[spec.name] = at::from_blob(static_cast<char*>(data_) + spec.offset, spec.shape, spec.stride, at::TensorOptions(spec.dtype));
    }
    part.runner = std::make_unique<torch::inductor::AOTIModelContainerRunnerCpu>(folder_ + "/" + part.library, 1);
    for (const auto& [name, weight] : part.runner->getConstantNamesToOriginalFQNs()) part.constants[name] = weights.at(weight);
    part.runner->update_constant_buffer(part.constants, false, true, true);
  }

  std::string folder_;
  std::vector<Spec> inputs_;
  std::vector<std::string> outputs_;
  std::vector<Part> parts_;
  void* data_ = nullptr;
  size_t size_ = 0;
};
