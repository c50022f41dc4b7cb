//! Tests of the operations in `hpctrain_device::ops::dropout`.

use crate::common::{Results, down, random, rounded, up};
use hpctrain_device::{Dropout, Kernels};

pub fn dropouts<B: Kernels>(b: &B) -> Results {
    let len = 40_000;
    let mask = |offset| Dropout { rate: 0.25, key: 9, offset };
    let mut whole = up(b, &vec![1.0; len]);
    b.dropout(mask(0), B::all_mut(&mut whole)).unwrap();
    let whole = down(b, &whole);
    let kept = whole.iter().filter(|&&x| x != 0.0).count() as f64 / len as f64;
    assert!((kept - 0.75).abs() < 0.01, "kept {kept}");
    let factor = rounded(b, &[1.0 / 0.75])[0];
    assert!(whole.iter().all(|&x| x == 0.0 || x == factor));
    // Any window sees its part of the same mask.
    for (start, end) in [(0, 1), (1, 2), (2, 20_001), (16_383, 16_390), (5, 5), (39_999, 40_000)] {
        let mut part = up(b, &vec![1.0; end - start]);
        b.dropout(mask(start as u64), B::all_mut(&mut part)).unwrap();
        assert_eq!(down(b, &part), whole[start..end], "{start}..{end}");
    }
    let mut other = up(b, &vec![1.0; len]);
    b.dropout(Dropout { key: 10, ..mask(0) }, B::all_mut(&mut other)).unwrap();
    assert_ne!(down(b, &other), whole);
    let mut none = up(b, &random(b, 35, 100));
    b.dropout(Dropout { rate: 0.0, ..mask(0) }, B::all_mut(&mut none)).unwrap();
    assert_eq!(down(b, &none), random(b, 35, 100));
    vec![whole]
}
