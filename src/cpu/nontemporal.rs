//! Non-temporal copies, which bypass the caches, for data that is not read soon or is read by
//! another core; prefetches of data that is read soon.
//!
//! An ordinary store first loads the line that it overwrites, so a copy moves three bytes for two.
//! The C library avoids that only for single copies larger than its caches. If the line is in
//! another core's cache, the load waits for that core.
//!
//! Non-temporal stores and prefetches are intrinsics, which are `unsafe`.

/// The least elements for which a non-temporal copy is faster.
const LARGE: usize = 1 << 16;

/// The least elements for which it is faster if another core's cache holds the target.
const MEDIUM: usize = 1 << 8;

/// Elements in a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 16;

/// Copies `from` to `to`, bypassing the caches if it is large.
pub fn copy(from: &[f32], to: &mut [f32]) {
    copy_from(LARGE, from, to);
}

/// Copies `from` to `to`, which this core does not read soon, or which another core has read and will
/// read again. Between cores
/// without a shared cache ordinary stores take several times as long.
pub fn copy_for_another_core(from: &[f32], to: &mut [f32]) {
    copy_from(MEDIUM, from, to);
}

/// Copies `from` to `to`, bypassing the caches from `least` elements on.
fn copy_from(least: usize, from: &[f32], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "a copy between windows of different lengths");
    if from.len() < least {
        to.copy_from_slice(from);
    } else {
        streamed(from, to);
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn streamed(from: &[f32], to: &mut [f32]) {
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
fn streamed(from: &[f32], to: &mut [f32]) {
    use std::arch::x86_64::{__m128, _mm_loadu_ps, _mm_sfence, _mm_stream_ps};

    /// Elements in a register.
    const WIDTH: usize = 4;

    // SAFETY: any bits are a valid __m128, as they are valid f32.
    let (head, lines, tail) = unsafe { to.align_to_mut::<[__m128; LINE / WIDTH]>() };
    let (first, rest) = from.split_at(head.len());
    let (middle, last) = rest.split_at(lines.len() * LINE);
    head.copy_from_slice(first);
    for (from, to) in middle.chunks_exact(LINE).zip(lines) {
        for (from, to) in from.chunks_exact(WIDTH).zip(to) {
            // SAFETY: four elements are there to be read; `align_to_mut` has aligned the target,
            // which is borrowed mutably. SSE is part of every x86-64.
            unsafe { _mm_stream_ps(std::ptr::from_mut(to).cast(), _mm_loadu_ps(from.as_ptr())) };
        }
    }
    tail.copy_from_slice(last);
    // SAFETY: as above. Other threads see the stores before any later one that announces the copy.
    unsafe { _mm_sfence() };
}

/// Prefetches the cache lines of `len` elements from index `first` on. Changes no memory.
#[inline(always)]
pub fn prefetch(x: &[f32], first: usize, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let mut line = first;
        while line < first + len {
            if let Some(line) = x.get(line) {
                // SAFETY: a hint, which is valid for any address. SSE is part of every x86-64.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(line).cast()) };
            }
            line += LINE;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, first, len);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_arrives_whatever_the_alignment() {
        let from: Vec<f32> = (0..LARGE + 50).map(|i| i as f32).collect();
        for (copy, least) in
            [(copy as fn(&[f32], &mut [f32]), LARGE), (copy_for_another_core, MEDIUM)]
        {
            for (start, len) in
                [(0, 0), (1, 5), (0, least), (1, least + 1), (3, least + 17), (7, least + 43)]
            {
                let mut to = vec![-1.0; start + len + 2];
                copy(&from[..len], &mut to[start..start + len]);
                assert!(to[start..start + len] == from[..len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|x| *x == -1.0));
            }
        }
    }
}
