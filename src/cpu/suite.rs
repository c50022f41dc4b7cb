//! The tests of all devices on the CPU, which must give the same bits with any number of threads.

use hpctrain_device_tests::common::{Results, bits, random};
use hpctrain_device_tests::each_operation;

use hpctrain_device::{Backend as _, ElementwiseOps as _, KernelStats};

use crate::{Cpu, MatmulBackend};

/// Panics unless an operation gives the same bits on any number of threads.
fn on_any_threads(test: fn(&Cpu) -> Results) {
    let one = bits(test(&Cpu::new(1)));
    for threads in [2, 3, 8] {
        assert!(
            bits(test(&Cpu::new(threads))) == one,
            "{threads} threads give other bits than one"
        );
    }
}

macro_rules! on_cpu {
    ($($operation:ident: $test:expr,)*) => {
        mod cpu {
            $(
                #[test]
                fn $operation() {
                    super::on_any_threads($test);
                }
            )*
        }
    };
}

each_operation! { on_cpu! {
    matmuls: |b| hpctrain_device_tests::linear::matmuls(b, super::random),
    convolutions: |b| hpctrain_device_tests::convolution::convolutions(b, super::random),
} }

/// Tests matmuls by this implementation on several numbers of threads; skips them if the CPU lacks
/// the instructions or the library is missing.
fn by(backend: MatmulBackend, random: fn(&Cpu, u64, usize) -> Vec<f32>) {
    let cpu = |threads| Cpu::new(threads).with_matmul_backend(backend);
    let one = match cpu(1) {
        Ok(cpu) => matmul_bits(&cpu, random),
        Err(e) => return eprintln!("skipped: {e}"),
    };
    for threads in [2, 3, 8] {
        let several = matmul_bits(&cpu(threads).unwrap(), random);
        assert!(several == one, "{threads} threads give other bits than one");
    }
}

/// Returns the bits of the results of convolutions and matmuls.
fn matmul_bits(cpu: &Cpu, random: fn(&Cpu, u64, usize) -> Vec<f32>) -> Vec<Vec<u32>> {
    let convolutions = hpctrain_device_tests::convolution::convolutions(cpu, random);
    bits([convolutions, hpctrain_device_tests::linear::matmuls(cpu, random)].concat())
}

#[test]
fn matmuls_by_onednn_are_right_and_do_not_depend_on_the_threads() {
    by(MatmulBackend::OneDnn, random);
}

#[test]
fn matmuls_of_bf16_are_right_where_the_cpu_has_them() {
    // Operands that bf16 can hold: the results are those of f32.
    by(MatmulBackend::BuiltinBf16, random_bf16);
    by(MatmulBackend::OneDnnBf16, random_bf16);
}

/// Returns random numbers that bf16 can hold.
fn random_bf16(_: &Cpu, seed: u64, len: usize) -> Vec<f32> {
    random(&Cpu::new(1), seed, len).into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect()
}

#[test]
fn launches_are_counted_while_it_records() {
    let cpu = Cpu::new(2);
    let x = vec![1.0; 100];
    let mut y = vec![2.0; 100];
    cpu.add(&x, &mut y).unwrap();
    assert!(cpu.profile().take().is_empty());
    cpu.profile().record(true);
    cpu.add(&x, &mut y).unwrap();
    cpu.clone().add(&x, &mut y).unwrap();
    cpu.profile().record(false);
    cpu.zero(&mut y).unwrap();
    cpu.profile().record(true);
    cpu.add(&x[1..], &mut y[1..]).unwrap();
    let tallies = cpu.profile().take();
    assert_eq!(
        tallies.keys().collect::<Vec<_>>(),
        [&("add", [99, 0, 0, 0]), &("add", [100, 0, 0, 0])]
    );
    let KernelStats { calls, seconds, fastest, flops, bytes } = tallies[&("add", [100, 0, 0, 0])];
    assert_eq!((calls, flops, bytes), (2, 0.0, 2400.0));
    assert!(fastest > 0.0 && seconds >= 2.0 * fastest);
    assert!(cpu.profile().take().is_empty());
}
