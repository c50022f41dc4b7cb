//! What both peers share: sizes, data, and the time of a step.

use std::time::Instant;

/// Layers, heads, width, context, batch, vocabulary, biases: those of `pytorch_gpt.py`.
pub struct Gpt {
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub context: usize,
    pub batch: usize,
    pub vocabulary: usize,
    pub bias: bool,
}

/// The model of this name.
pub fn gpt(size: &str) -> Option<Gpt> {
    let of = |[layers, heads, width, context, batch, vocabulary]: [usize; 6], bias| Gpt {
        layers,
        heads,
        width,
        context,
        batch,
        vocabulary,
        bias,
    };
    match size {
        "char" => Some(of([4, 4, 128, 64, 12, 65], false)),
        "baby" => Some(of([6, 6, 384, 256, 4, 65], false)),
        "gpt2-124m" => Some(of([12, 12, 768, 64, 4, 50257], true)),
        _ => None,
    }
}

/// Some ids below `bound`.
pub fn ids(len: usize, factor: usize, bound: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * factor + 13) % bound) as u32).collect()
}

/// The size and the number of steps that the command line asks for.
pub fn arguments() -> (String, usize) {
    let mut arguments = std::env::args().skip(1);
    let size = arguments.next().expect("char, baby, gpt2-124m, mlp or cnn");
    (size, arguments.next().map_or(50, |steps| steps.parse().expect("a number of steps")))
}

/// Prints how much a second gets done, by the median step. A step does `work`.
pub fn time(work: usize, steps: usize, mut step: impl FnMut()) {
    (0..5).for_each(|_| step());
    let mut seconds: Vec<f64> = (0..steps)
        .map(|_| {
            let start = Instant::now();
            step();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    println!("{}", work as f64 / seconds[steps / 2]);
}

/// Subnormal numbers are flushed to zero on all threads, as in the other programs: without, moments
/// of weights behind dead rectifiers are slow.
pub fn flush_subnormals() {
    fn flush() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: reads and writes the calling thread's own control register, whose other bits
        // stay.
        unsafe {
            let mut control = 0u32;
            std::arch::asm!("stmxcsr [{0}]", "or dword ptr [{0}], 0x8040", "ldmxcsr [{0}]", in(reg) &mut control);
        }
    }
    flush();
    rayon::ThreadPoolBuilder::new().start_handler(|_| flush()).build_global().expect("the first pool");
}
