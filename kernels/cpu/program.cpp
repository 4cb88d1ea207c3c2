// Runs operators one after another from a list of their calls: one call from Python for all layers of a step.
// How a list is made is in kernels/program.py.
#include <algorithm>
#include <array>
#include <bit>
#include <tuple>
#include <type_traits>
#include <utility>

#include "operators.h"

namespace sluicegate {
namespace {

constexpr size_t MAX_ARGUMENTS = 23;

// An argument is a word: an address, an integer, or the bits of a float32 in the lower half. That at
// `rows_at` stands for the number of rows, which each run has its own of.
struct Call {
    int64_t operation, rows_at;
    std::array<int64_t, MAX_ARGUMENTS> arguments;
};

template <class A>
A from_word(int64_t word) {
    if constexpr (std::is_pointer_v<A>) return reinterpret_cast<A>(word);
    else if constexpr (std::is_same_v<A, float>) return std::bit_cast<float>((int32_t)word);
    else return static_cast<A>(word);
}

template <class R, class... A>
bool invoke(R (*function)(A...), const std::array<int64_t, MAX_ARGUMENTS>& words) {
    static_assert(sizeof...(A) <= MAX_ARGUMENTS);
    return [&]<size_t... I>(std::index_sequence<I...>) {
        if constexpr (std::is_void_v<R>) {
            function(from_word<A>(words[I])...);
            return true;
        } else {
            return function(from_word<A>(words[I])...);
        }
    }(std::index_sequence_for<A...>());
}

// In the order of OPERATIONS in kernels/program.py.
constexpr auto OPERATIONS = std::make_tuple(sluicegate_linear, sluicegate_rms_norm, sluicegate_head_norm,
                                            sluicegate_rope, sluicegate_silu_and_mul, sluicegate_gelu_and_mul,
                                            sluicegate_write_kv, sluicegate_attention, sluicegate_route,
                                            sluicegate_experts);

bool run(const Call& call, int64_t num_rows) {
    auto words = call.arguments;
    words[call.rows_at] = num_rows;
    return [&]<size_t... I>(std::index_sequence<I...>) {
        bool good = false;
        ((call.operation == (int64_t)I ? (void)(good = invoke(std::get<I>(OPERATIONS), words)) : void()), ...);
        return good;
    }(std::make_index_sequence<std::tuple_size_v<decltype(OPERATIONS)>>());
}

}  // namespace

// Answers how many calls were made: all of them, or those before one that refused its indices.
extern "C" int64_t sluicegate_run_program(const Call* calls, int64_t count, int64_t num_rows) {
    return std::find_if(calls, calls + count, [&](const Call& call) { return !run(call, num_rows); }) - calls;
}

}  // namespace sluicegate
