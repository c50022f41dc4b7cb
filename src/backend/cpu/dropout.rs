//! Dropout (Srivastava et al., 2014) with masks computed from a counter.

use super::elementwise::CHUNK;
use super::math::simd;
use super::threads::Threads;
use crate::backend::Dropout;
use crate::random::Stream;

pub fn dropout(threads: &Threads, mask: Dropout, x: &mut [f32]) {
    if mask.rate == 0.0 {
        return;
    }
    let stream = Stream::new(mask.key);
    let dropped_below = (f64::from(mask.rate) * 4_294_967_296.0) as u32;
    let kept = 1.0 / (1.0 - mask.rate);
    threads.each(x.chunks_mut(CHUNK).enumerate(), |(i, x)| {
        let first = mask.offset + (i * CHUNK) as u64;
        simd(
            #[inline(always)]
            || {
                // Four elements share a counter block; the window may begin inside one.
                let lead = ((4 - first % 4) % 4).min(x.len() as u64) as usize;
                let (head, body) = x.split_at_mut(lead);
                let words = stream.block(first / 4);
                for (j, x) in head.iter_mut().enumerate() {
                    *x *= if words[(first % 4) as usize + j] < dropped_below { 0.0 } else { kept };
                }
                let block = first.div_ceil(4);
                for (j, quad) in body.chunks_mut(4).enumerate() {
                    let words = stream.block(block + j as u64);
                    for (x, word) in quad.iter_mut().zip(words) {
                        *x *= if word < dropped_below { 0.0 } else { kept };
                    }
                }
            },
        );
    });
}
