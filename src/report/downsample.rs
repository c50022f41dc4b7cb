//! Downsampling of curves that keeps their peaks.
//!
//! A curve with more than two points per bucket is split into buckets of equally many records. Of
//! each bucket the lowest and the highest value are kept at their steps, and the first point
//! without a value, where the line breaks. The mean of each bucket is also kept, for smoothed
//! lines.

use serde::Serialize;

/// A step and its value, which is not finite if it is missing.
pub type Point = (u64, f64);

/// A curve in the page's data.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Curve {
    /// The steps, ascending.
    pub x: Vec<u64>,
    /// The values; null where the line breaks.
    pub y: Vec<Option<f64>>,
    /// The means of the buckets at their middle steps, if the curve was downsampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Means>,
    /// Whether it has few points, which are then marked.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sparse: bool,
}

/// The means of buckets.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Means {
    /// The middle steps of the buckets.
    pub x: Vec<u64>,
    /// The means; null for buckets without values.
    pub y: Vec<Option<f64>>,
}

impl Curve {
    /// Creates the curve of `points`, ascending by step, downsampled to at most this many buckets.
    pub fn downsampled(points: &[Point], buckets: usize) -> Self {
        if points.len() <= 2 * buckets {
            return Self {
                x: points.iter().map(|point| point.0).collect(),
                y: shown(points),
                ..Self::default()
            };
        }
        let mut kept: Vec<Point> = Vec::with_capacity(2 * buckets + 2);
        let mut means = Means::default();
        for bucket in parts(points, buckets) {
            let mut extremes_of_bucket = extremes(bucket);
            extremes_of_bucket.sort_by_key(|point| point.0);
            kept.extend(extremes_of_bucket);
            means.x.push(middle(bucket));
            means.y.push(mean(bucket.iter().map(|point| point.1)).map(rounded));
        }
        // The first and the last point are always kept.
        kept.insert(0, points[0]);
        kept.push(points[points.len() - 1]);
        kept.dedup_by_key(|point| point.0);
        Self {
            x: kept.iter().map(|point| point.0).collect(),
            y: shown(&kept),
            mean: Some(means),
            sparse: false,
        }
    }

    /// Creates a curve with few points, which are marked.
    pub fn sparse(points: &[Point], buckets: usize) -> Self {
        Self { sparse: true, mean: None, ..Self::downsampled(points, buckets) }
    }
}

/// Splits a slice into at most `count` parts of equal length; the last may be shorter.
pub fn parts<T>(all: &[T], count: usize) -> std::slice::Chunks<'_, T> {
    all.chunks(all.len().div_ceil(count.max(1)).max(1))
}

/// Returns the middle step of a bucket.
fn middle(points: &[Point]) -> u64 {
    points.get(points.len() / 2).map_or(0, |point| point.0)
}

/// Returns the points with the lowest and the highest value, and the first point without a value.
fn extremes(bucket: &[Point]) -> Vec<Point> {
    let finite = || bucket.iter().filter(|point| point.1.is_finite());
    let lowest = finite().min_by(|one, other| one.1.total_cmp(&other.1));
    let highest = finite().max_by(|one, other| one.1.total_cmp(&other.1));
    let gap = bucket.iter().find(|point| !point.1.is_finite());
    [lowest, highest, gap].into_iter().flatten().copied().collect()
}

/// Returns the mean of the finite values, if there are any.
pub fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values
        .filter(|value| value.is_finite())
        .fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
    (count > 0).then(|| sum / f64::from(count))
}

fn shown(points: &[Point]) -> Vec<Option<f64>> {
    points
        .iter()
        .map(|point| Some(point.1).filter(|value| value.is_finite()).map(rounded))
        .collect()
}

/// Rounds a number to the eight digits that a page shows at most.
pub fn rounded(value: f64) -> f64 {
    format!("{value:.7e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_curves_stay_as_they_are() {
        let points: Vec<Point> = (1..=20).map(|step| (step, 1.0 / step as f64)).collect();
        let curve = Curve::downsampled(&points, 10);
        assert!(curve.mean.is_none() && curve.x.len() == 20);
        assert!((curve.y[2].unwrap() - 1.0 / 3.0).abs() < 1e-8);
        assert_eq!(Curve::downsampled(&[], 10), Curve::default());
    }

    #[test]
    fn peaks_and_gaps_survive() {
        let mut points: Vec<Point> = (1..=100_000).map(|step| (step, (step % 7) as f64)).collect();
        points[54_321].1 = 99.0;
        points[54_323].1 = -50.0;
        points[70_000].1 = f64::NAN;
        let curve = Curve::downsampled(&points, 500);
        assert!(curve.x.len() <= 2 * 500 + 3, "{}", curve.x.len());
        let at = |step: u64| curve.y[curve.x.iter().position(|x| *x == step).unwrap()];
        assert_eq!((at(54_322), at(54_324), at(70_001)), (Some(99.0), Some(-50.0), None));
        assert!(curve.x.is_sorted() && curve.x[0] == 1 && *curve.x.last().unwrap() == 100_000);
        let means = curve.mean.unwrap();
        assert!(
            means.x.len() == 500 && (means.y[0].unwrap() - 3.0).abs() < 0.1,
            "{:?}",
            means.y[0]
        );
    }

    #[test]
    fn a_curve_without_any_value_has_no_means() {
        let points: Vec<Point> = (1..=100).map(|step| (step, f64::NAN)).collect();
        let curve = Curve::downsampled(&points, 10);
        assert!(
            curve.y.iter().all(Option::is_none)
                && curve.mean.unwrap().y.iter().all(Option::is_none)
        );
    }
}
