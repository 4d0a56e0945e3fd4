// A compiled Stan model behind a few functions of C: rows of unconstrained vectors in, numbers out.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <stan/io/json/json_data.hpp>
#include <stan/model/model_base.hpp>
#include <stan/services/util/create_rng.hpp>
#include <string>
#include <vector>

stan::model::model_base& new_model(stan::io::var_context& data, unsigned int seed, std::ostream* messages);

namespace {

using Model = stan::model::model_base;

thread_local std::string said;  // the last error, or the last text that was asked for
const double nan_value = std::numeric_limits<double>::quiet_NaN();

const Model& of(void* model) { return *static_cast<Model*>(model); }

// Call a function; return whether it has failed, and keep why. Each thread has a tape of derivatives of its own.
template <typename Function>
int failed(const Function& function) {
  static thread_local stan::math::ChainableStack tape;
  try {
    function();
    return 0;
  } catch (const std::bad_alloc&) {
    said = "";
    return 2;
  } catch (const std::exception& error) {
    said = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* last_text() { return said.c_str(); }

int make(const char* data, void** model) {
  return failed([&] {
    std::istringstream stream(data);
    stan::json::json_data context(stream);
    std::ostringstream messages;
    *model = &new_model(context, 1, &messages);
  });
}

void discard(void* model) { delete static_cast<Model*>(model); }

int64_t dimension(void* model) { return of(model).num_params_r(); }

// Names of the elements, one in a line: unconstrained ones, or values with transformed parameters and with all.
const char* names(void* model, int unconstrained, int transformed, int generated) {
  std::vector<std::string> found;
  if (unconstrained) of(model).unconstrained_param_names(found, false, false);
  else of(model).constrained_param_names(found, transformed, generated);
  said.clear();
  for (const auto& name : found) said += name + "\n";
  return said.c_str();
}

// Log densities (rows) with their gradients (rows, d), or alone where `gradient` is null, which costs a fraction. Where
// the model rejects a vector the density is zero. Returns the number of such rows, or -1 without memory.
int64_t evaluate(void* model, const double* u, int64_t rows, double* value, double* gradient) {
  const Model& one = of(model);
  const int64_t dim = one.num_params_r();
  std::ostringstream messages;
  const auto density = [&](Eigen::Matrix<stan::math::var, -1, 1>& x) { return one.log_prob_jacobian(x, &messages); };
  Eigen::VectorXd point(dim), slope(dim);
  int64_t rejected = 0;
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(point.data(), u + row * dim, dim * sizeof(double));
    const int status = failed([&] {
      if (gradient) stan::math::gradient(density, point, value[row], slope);
      else value[row] = one.log_prob_jacobian(point, &messages);
    });
    if (status) {
      if (status == 2) return -1;
      value[row] = -std::numeric_limits<double>::infinity();
      slope.setZero();
      ++rejected;
      stan::math::recover_memory();
    }
    if (gradient) std::memcpy(gradient + row * dim, slope.data(), dim * sizeof(double));
  }
  return rejected;
}

// Log Jacobians of the transforms (rows).
int log_jacobian(void* model, const double* u, int64_t rows, double* value) {
  const Model& one = of(model);
  const int64_t dim = one.num_params_r();
  std::ostringstream messages;
  for (int64_t row = 0; row < rows; ++row) {
    Eigen::VectorXd point = Eigen::Map<const Eigen::VectorXd>(u + row * dim, dim);
    if (failed([&] { value[row] = one.log_prob_jacobian(point, &messages) - one.log_prob(point, &messages); }))
      value[row] = nan_value;
  }
  return 0;
}

// Values (rows, size) of parameters, and of transformed parameters and generated quantities if these are asked for.
int constrain(void* model, const double* u, int64_t rows, int transformed, int generated, unsigned int seed,
              int64_t size, double* values) {
  const Model& one = of(model);
  const int64_t dim = one.num_params_r();
  std::ostringstream messages;
  for (int64_t row = 0; row < rows; ++row) {
    Eigen::VectorXd point = Eigen::Map<const Eigen::VectorXd>(u + row * dim, dim), found;
    auto generator = stan::services::util::create_rng(seed, row + 1);
    const int status = failed([&] { one.write_array(generator, point, found, transformed, generated, &messages); });
    if (status == 2) return 2;
    for (int64_t i = 0; i < size; ++i) values[row * size + i] = status || found.size() != size ? nan_value : found[i];
  }
  return 0;
}

// Unconstrained vectors (rows, d) of values of the parameters (rows, size).
int unconstrain(void* model, const double* values, int64_t rows, int64_t size, double* u) {
  const Model& one = of(model);
  const int64_t dim = one.num_params_r();
  std::ostringstream messages;
  for (int64_t row = 0; row < rows; ++row) {
    const Eigen::VectorXd given = Eigen::Map<const Eigen::VectorXd>(values + row * size, size);
    Eigen::VectorXd found;
    if (const int status = failed([&] { one.unconstrain_array(given, found, &messages); })) return status;
    std::memcpy(u + row * dim, found.data(), dim * sizeof(double));
  }
  return 0;
}

}  // extern "C"
