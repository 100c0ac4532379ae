/* Which of the libraries this processor can use: the level of x86-64 that they were compiled for, or 1. */

int kc_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            return 4;
        return 3;
    }
#endif
    return 1;
}

/* Of what the library was compiled from. */
const char *kc_sources(void) { return KC_SOURCES; }
