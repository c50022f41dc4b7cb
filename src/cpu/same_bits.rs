//! The bits of all operations are equal on x86 with AVX-512 and on ARM: `same_bits.tsv` has their
//! hashes. After a change of a kernel or of its test, replace its line by the one that the failure
//! prints on a CPU with AVX-512.

use hpctrain_device::{Gemm, LinearOps as _};
use hpctrain_device_tests::common::{Results, random};
use hpctrain_device_tests::each_operation;

use crate::Cpu;

/// Returns the FNV-1a hash of the bits.
fn hash(results: &Results) -> u64 {
    let bytes = results.iter().flatten().flat_map(|x| x.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Returns a matmul in each combination of transposed and other operands, written and added.
fn matmul(cpu: &Cpu, [m, n, k]: [usize; 3]) -> Results {
    let a = random(cpu, 1, m * k);
    let b = random(cpu, 2, k * n);
    let combinations = (0..8).map(|case| [1, 2, 4].map(|bit| case & bit > 0));
    let result = |[ta, tb, acc]: [bool; 3]| {
        let mut c = random(cpu, 3, m * n);
        cpu.gemm(Gemm { m, n, k, ta, tb, acc }, &a, &b, &mut c).unwrap();
        c
    };
    combinations.map(result).collect()
}

/// Panics unless the results of an operation have the hash in the table.
fn compare(name: &str, operation: fn(&Cpu) -> Results) {
    #[cfg(target_arch = "x86_64")]
    if !is_x86_feature_detected!("avx512f") {
        return eprintln!("skipped: the CPU has no AVX-512");
    }
    let found = format!("{name}\t{:016x}", hash(&operation(&Cpu::new(1))));
    let is_listed = include_str!("same_bits.tsv").lines().any(|line| line == found);
    assert!(is_listed, "the bits differ from same_bits.tsv; here they are\n{found}");
}

macro_rules! tests {
    ($($operation:ident: $test:expr,)*) => {
        $(
            #[test]
            fn $operation() {
                compare(stringify!($operation), $test);
            }
        )*
    };
}

each_operation! { tests! {
    matmul_48_48_48: |cpu| matmul(cpu, [48, 48, 48]),
    matmul_96_64_512: |cpu| matmul(cpu, [96, 64, 512]),
    matmul_64_192_301: |cpu| matmul(cpu, [64, 192, 301]),
    matmul_7_5_33: |cpu| matmul(cpu, [7, 5, 33]),
    matmul_1_512_128: |cpu| matmul(cpu, [1, 512, 128]),
    matmul_1_128_1500: |cpu| matmul(cpu, [1, 128, 1500]),
    matmul_300_1_777: |cpu| matmul(cpu, [300, 1, 777]),
    matmul_12_20_300: |cpu| matmul(cpu, [12, 20, 300]),
    matmul_20_30_2: |cpu| matmul(cpu, [20, 30, 2]),
    matmul_300_260_1100: |cpu| matmul(cpu, [300, 260, 1100]),
    matmuls: |cpu| hpctrain_device_tests::linear::matmuls(cpu, random),
    convolutions: |cpu| hpctrain_device_tests::convolution::convolutions(cpu, random),
} }
