// Working memory of the operators.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace sluicegate {

// Floats at a multiple of 64 bytes, not initialised. A full-width load elsewhere straddles two cache
// lines: with AVX-512, products with operands so placed ran at two thirds of the rate.
class Floats {
public:
    Floats() = default;
    explicit Floats(int64_t count) { reserve(count); }

    // Room for `count`. What was there is lost if it has to grow.
    float* reserve(int64_t count) {
        if (count > count_) {
            memory_.reset(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
            if (!memory_) throw std::bad_alloc();
            count_ = count;
        }
        return memory_.get();
    }

    float* data() { return memory_.get(); }
    float& operator[](int64_t i) { return memory_.get()[i]; }

private:
    struct Free {
        void operator()(float* memory) const { std::free(memory); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t count_ = 0;
};

}  // namespace sluicegate
