//! Curves with fewer points that keep their peaks.
//!
//! A curve of more than two points a bucket is cut into buckets of equal numbers of records. Of
//! each bucket the lowest and the highest value stay, at their steps, and the first place without a
//! value, where the line breaks. The mean of each bucket is kept beside them, for smooth lines.

use serde::Serialize;

/// A point: a step, and a value that is not finite where there is none.
pub type Point = (u64, f64);

/// A curve as the page has it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Curve {
    /// Steps, ascending.
    pub x: Vec<u64>,
    /// Values; null where the line breaks.
    pub y: Vec<Option<f64>>,
    /// Means of the buckets at their middle steps, if points were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Means>,
    /// Whether its points are few and shown as such.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sparse: bool,
}

/// Means of buckets.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Means {
    /// Middle steps of the buckets.
    pub x: Vec<u64>,
    /// Means; null where a bucket has no value.
    pub y: Vec<Option<f64>>,
}

impl Curve {
    /// The curve of `points`, ascending by step, in at most so many buckets.
    pub fn thinned(points: &[Point], buckets: usize) -> Self {
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
            let mut of_bucket = extremes(bucket);
            of_bucket.sort_by_key(|point| point.0);
            kept.extend(of_bucket);
            means.x.push(middle(bucket));
            means.y.push(mean(bucket.iter().map(|point| point.1)).map(rounded));
        }
        // The curve begins and ends where it does.
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

    /// A curve of few points.
    pub fn sparse(points: &[Point], buckets: usize) -> Self {
        Self { sparse: true, mean: None, ..Self::thinned(points, buckets) }
    }
}

/// At most so many parts of equal lengths, of which the last may be shorter.
pub fn parts<T>(all: &[T], count: usize) -> std::slice::Chunks<'_, T> {
    all.chunks(all.len().div_ceil(count.max(1)).max(1))
}

/// The middle step of a part.
fn middle(points: &[Point]) -> u64 {
    points.get(points.len() / 2).map_or(0, |point| point.0)
}

/// The lowest and the highest value, and the first place without one.
fn extremes(bucket: &[Point]) -> Vec<Point> {
    let finite = || bucket.iter().filter(|point| point.1.is_finite());
    let lowest = finite().min_by(|one, other| one.1.total_cmp(&other.1));
    let highest = finite().max_by(|one, other| one.1.total_cmp(&other.1));
    let gap = bucket.iter().find(|point| !point.1.is_finite());
    [lowest, highest, gap].into_iter().flatten().copied().collect()
}

/// The mean of the finite ones, if there are any.
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

/// A number with the eight digits that a page shows at most.
pub fn rounded(value: f64) -> f64 {
    format!("{value:.7e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_curves_stay_as_they_are() {
        let points: Vec<Point> = (1..=20).map(|step| (step, 1.0 / step as f64)).collect();
        let curve = Curve::thinned(&points, 10);
        assert!(curve.mean.is_none() && curve.x.len() == 20);
        assert!((curve.y[2].unwrap() - 1.0 / 3.0).abs() < 1e-8);
        assert_eq!(Curve::thinned(&[], 10), Curve::default());
    }

    #[test]
    fn peaks_and_gaps_survive() {
        let mut points: Vec<Point> = (1..=100_000).map(|step| (step, (step % 7) as f64)).collect();
        points[54_321].1 = 99.0;
        points[54_323].1 = -50.0;
        points[70_000].1 = f64::NAN;
        let curve = Curve::thinned(&points, 500);
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
        let curve = Curve::thinned(&points, 10);
        assert!(
            curve.y.iter().all(Option::is_none)
                && curve.mean.unwrap().y.iter().all(Option::is_none)
        );
    }
}
