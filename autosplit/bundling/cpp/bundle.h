// Runs a network of a bundle whose parts are AOTInductor libraries, without Python. Needs libtorch.
//
//     Bundle bundle("app.asb", "mlp");
//     std::vector<at::Tensor> outputs = bundle.run(inputs);
//
// `table.txt` is the table of the parts. The weights are mapped and read where they lie. Everything in the table is compared with
// the weights file and with the libraries before it is used; a fault is a std::exception.
#pragma once

#include <ATen/DynamicLibrary.h>
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

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

constexpr int64_t kAlignment = 64;           // of each weight in the weights file, in bytes
constexpr int64_t kMaxBytes = int64_t{1} << 40;  // largest tensor, size and stride
constexpr size_t kMaxDims = 64;

// Throws the sentence unless `holds`.
inline void require(bool holds, const std::string& sentence) {
  if (!holds) throw std::runtime_error(sentence);
}

// The sentence of an error, without the stack that torch appends.
inline std::string sentence_of(const std::exception& failure) {
  const std::string text = failure.what();
  return text.substr(0, text.find('\n'));
}

struct Spec {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  // of a weight, in bytes from the start of the weights file
  std::vector<int64_t> shape, stride;
  int64_t num_elements = 1;
  int64_t extent_bytes = 0;  // from the first element to the last one, gaps included

  // Computes the counts. Throws if the layout is one that no tensor has.
  void measure() {
    int64_t last = 0, step = 0;
    bool fits = true;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      fits = fits && shape[dim] >= 0 && stride[dim] >= 0 && !__builtin_mul_overflow(num_elements, shape[dim], &num_elements);
      if (!fits || shape[dim] == 0) continue;
      fits = !__builtin_mul_overflow(shape[dim] - 1, stride[dim], &step) && !__builtin_add_overflow(last, step, &last);
    }
    const auto item = static_cast<int64_t>(at::elementSize(dtype));
    fits = fits && num_elements <= kMaxBytes / item && last < kMaxBytes / item;
    require(fits, "the table is damaged: '" + name + "' has sizes or strides that are negative or above " +
                      std::to_string(kMaxBytes) + " bytes");
    extent_bytes = num_elements == 0 ? 0 : (last + 1) * item;
  }
};

// A library with the facts that libtorch's runner keeps to itself.
class Library : public torch::inductor::AOTIModelContainerRunnerCpu {
 public:
  struct Constant {
    std::string name, weight;
    int32_t dtype = 0;
    size_t num_bytes = 0;  // up to the next boundary of 64 bytes
  };

  explicit Library(const std::string& path) : AOTIModelContainerRunnerCpu(path, 1) {}

  size_t num_inputs() const { return count("AOTInductorModelContainerGetNumInputs"); }
  size_t num_outputs() const { return count("AOTInductorModelContainerGetNumOutputs"); }

  std::vector<Constant> constants() const {
    const auto bytes_of =
        symbol<decltype(&AOTInductorModelContainerGetConstantDataSize)>("AOTInductorModelContainerGetConstantDataSize");
    const auto dtypes = getConstantNamesToDtypes();
    const auto weights = getConstantNamesToOriginalFQNs();
    std::vector<Constant> found(count("AOTInductorModelContainerGetNumConstants"));
    for (size_t k = 0; k < found.size(); ++k) {
      const char* name = nullptr;
      must(get_constant_name_func_(container_handle_, k, &name));
      must(bytes_of(container_handle_, k, &found[k].num_bytes));
      found[k].name = name;
      found[k].weight = weights.at(name);
      found[k].dtype = dtypes.at(name);
    }
    return found;
  }

 private:
  static void must(AOTIRuntimeError error) { require(error == 0, "the library does not describe itself"); }

  template <typename Function>
  Function symbol(const char* name) const {
    return reinterpret_cast<Function>(model_so_->sym(name));
  }

  size_t count(const char* name) const {  // all counts have one signature
    size_t found = 0;
    must(symbol<decltype(&AOTInductorModelContainerGetNumInputs)>(name)(container_handle_, &found));
    return found;
  }
};

// A file mapped for reading.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat facts {};
    const bool regular = fd >= 0 && fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode);
    num_bytes = facts.st_size;
    void* mapped = regular ? mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    if (fd >= 0) close(fd);
    require(mapped != MAP_FAILED, "'" + path + "' cannot be read");
    data = static_cast<char*>(mapped);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data, static_cast<size_t>(num_bytes)); }

  char* data = nullptr;
  int64_t num_bytes = 0;
};

struct Part {
  std::string file;
  int threads = 1;
  std::map<std::string, Spec> weights;
  std::vector<std::string> inputs, outputs;
  std::unordered_map<std::string, at::Tensor> constants;  // the library does not own them
  std::unique_ptr<Library> library;
};

class Bundle {
 public:
  Bundle(const std::string& folder, const std::string& network) : folder_(folder) {
    setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);  // each library compares its inputs with the layouts that it was compiled for
    read_table(network);
    check_values();
    weights_ = std::make_unique<Mapping>(folder_ + "/weights.safetensors");
    for (auto& part : parts_) load(part);
  }

  const std::vector<Spec>& inputs() const { return inputs_; }

  // One request: the inputs in the order of the table, the outputs in the order of the model.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    require(inputs.size() == inputs_.size(), "the network takes " + std::to_string(inputs_.size()) + " inputs");
    std::map<std::string, at::Tensor> values;
    for (size_t k = 0; k < inputs.size(); ++k) {
      const Spec& spec = inputs_[k];
      require(inputs[k].sizes() == at::IntArrayRef(spec.shape) && inputs[k].scalar_type() == spec.dtype,
              "input '" + spec.name + "' has another shape or dtype than the bundle was made for");
      values[spec.name] = at::empty_strided(spec.shape, spec.stride, spec.dtype).copy_(inputs[k]);
    }
    for (auto& part : parts_) {
      std::vector<at::Tensor> given;
      for (const auto& name : part.inputs) given.push_back(values.at(name));
      at::set_num_threads(part.threads);
      try {
        std::vector<at::Tensor> made = part.library->run(given);
        for (size_t k = 0; k < made.size(); ++k) values[part.outputs.at(k)] = made[k];
      } catch (const std::exception& failure) {
        throw std::runtime_error("part '" + part.file + "' fails: " + sentence_of(failure));
      }
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
    require(found != known.end(), "the table has dtype '" + name + "', which this driver does not know");
    return found->second;
  }

  static Spec read_spec(std::istringstream& line) {
    Spec spec;
    std::string dtype;
    size_t dims = 0;
    line >> spec.name >> dtype >> spec.offset >> dims;
    require(line && dims <= kMaxDims, "the table is damaged at '" + spec.name + "'");
    spec.dtype = dtype_of(dtype);
    spec.shape.resize(dims);
    spec.stride.resize(dims);
    for (auto& size : spec.shape) line >> size;
    for (auto& step : spec.stride) line >> step;
    require(bool(line), "the table is damaged at '" + spec.name + "'");
    spec.measure();
    return spec;
  }

  void read_table(const std::string& network) {
    const std::string path = folder_ + "/table.txt";
    std::ifstream file;
    if (std::filesystem::is_regular_file(path)) file.open(path);
    std::string text, here;
    require(std::getline(file, text) && text == "autosplit bundle 2", "'" + path + "' is missing, or of another version than 2");
    bool whole = false;
    while (std::getline(file, text)) {
      std::istringstream line(text);
      std::string kind;
      line >> kind;
      whole = kind == "end";
      if (kind == "network") {
        std::getline(line >> std::ws, here);
      } else if (here == network && !whole) {
        read_line(kind, line);
        require(!line.fail() && (line >> std::ws).eof(), "'" + path + "' is damaged at '" + text + "'");
      }
    }
    require(whole, "'" + path + "' is truncated");
    require(!parts_.empty(), "the bundle has no network '" + network + "' of AOTInductor parts");
  }

  void read_line(const std::string& kind, std::istringstream& line) {
    std::string name;
    if (kind == "input") {
      inputs_.push_back(read_spec(line));
    } else if (kind == "variants") {
      int64_t num_variants = 0;
      line >> num_variants;
      require(num_variants == 1, "this driver runs networks for requests of one size, and this one is for several: run it with " +
                                     std::string("autosplit.load_bundle, or make the bundle of a plan for one size"));
    } else if (kind == "output") {
      line >> name;
      outputs_.push_back(name);
    } else if (kind == "part") {
      Part& part = parts_.emplace_back();
      line >> part.file >> part.threads;
      require(part.file.find('/') == std::string::npos, "a library lies outside of the bundle");
      require(part.threads >= 1, "part '" + part.file + "' has " + std::to_string(part.threads) + " threads");
      part.threads = std::min(part.threads, std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
    } else if (!parts_.empty() && kind == "weight") {
      const Spec spec = read_spec(line);
      parts_.back().weights[spec.name] = spec;
    } else if (!parts_.empty() && (kind == "reads" || kind == "makes")) {
      line >> name;
      (kind == "reads" ? parts_.back().inputs : parts_.back().outputs).push_back(name);
    } else {
      throw std::runtime_error("the table has a line of kind '" + kind + "' where none may be");
    }
  }

  // Each value is there before it is read, and is made once.
  void check_values() const {
    std::set<std::string> there;
    for (const auto& spec : inputs_) {
      require(there.insert(spec.name).second, "input '" + spec.name + "' is in the table twice");
      require(spec.num_elements > 0, "input '" + spec.name + "' has no elements, and this driver runs no network on such an input");
    }
    for (const auto& part : parts_) {
      for (const auto& name : part.inputs)
        require(there.count(name), "part '" + part.file + "' reads '" + name + "', which is not there yet");
      for (const auto& name : part.outputs) require(there.insert(name).second, "value '" + name + "' is made twice");
    }
    for (const auto& name : outputs_) require(there.count(name), "output '" + name + "' is not an input, and no part makes it");
  }

  void load(Part& part) {
    part.library = std::make_unique<Library>(folder_ + "/" + part.file);
    require(part.library->num_inputs() == part.inputs.size() && part.library->num_outputs() == part.outputs.size(),
            "the table gives '" + part.file + "' " + std::to_string(part.inputs.size()) + " inputs and " +
                std::to_string(part.outputs.size()) + " outputs, and it has " + std::to_string(part.library->num_inputs()) +
                " and " + std::to_string(part.library->num_outputs()));
    for (const auto& constant : part.library->constants()) {
      const auto found = part.weights.find(constant.weight);
      require(found != part.weights.end(), "the table lacks weight '" + constant.weight + "' of '" + part.file + "'");
      part.constants[constant.name] = weight_of(found->second, constant);
    }
    part.library->update_constant_buffer(part.constants, false, true, true);
  }

  at::Tensor weight_of(const Spec& spec, const Library::Constant& constant) const {
    const int64_t padded_bytes = (spec.extent_bytes + kAlignment - 1) / kAlignment * kAlignment;
    require(spec.offset >= 0 && spec.offset % kAlignment == 0 && spec.offset <= weights_->num_bytes &&
                spec.extent_bytes <= weights_->num_bytes - spec.offset,
            "weight '" + spec.name + "' lies outside of the weights file, or not on a boundary of 64 bytes");
    require(static_cast<int32_t>(spec.dtype) == constant.dtype && constant.num_bytes <= static_cast<size_t>(padded_bytes),
            "weight '" + spec.name + "' has another dtype or fewer bytes in the table than in its library");
    return at::from_blob(weights_->data + spec.offset, spec.shape, spec.stride, at::TensorOptions(spec.dtype));
  }

  std::string folder_;
  std::vector<Spec> inputs_;
  std::vector<std::string> outputs_;
  std::unique_ptr<Mapping> weights_;
  std::vector<Part> parts_;  // after the weights: libraries go before the memory that they read
};
