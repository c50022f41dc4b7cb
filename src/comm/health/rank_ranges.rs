//! Serializes ascending rank numbers as short text, such as `0-7,12,16-96:8`, where the last part
//! is every eighth rank.

use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

/// The least length of a run that is written as a range.
const SHORTEST_RUN: usize = 3;

pub fn serialize<S: Serializer>(numbers: &[usize], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&text(numbers))
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<usize>, D::Error> {
    let text = String::deserialize(from)?;
    numbers(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is not a list of ranks")))
}

fn text(numbers: &[usize]) -> String {
    let mut parts = Vec::new();
    let mut rest = numbers;
    while let [first, after @ ..] = rest {
        let step = after.first().map_or(0, |next| next.saturating_sub(*first));
        let run =
            rest.windows(2).take_while(|pair| step > 0 && pair[0] + step == pair[1]).count() + 1;
        let taken = if run < SHORTEST_RUN { 1 } else { run };
        parts.push(match (taken, step) {
            (1, _) => first.to_string(),
            (_, 1) => format!("{first}-{}", rest[taken - 1]),
            _ => format!("{first}-{}:{step}", rest[taken - 1]),
        });
        rest = &rest[taken..];
    }
    parts.join(",")
}

fn numbers(text: &str) -> Option<Vec<usize>> {
    let mut found = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (range, step) = part
            .split_once(':')
            .map_or(Some((part, 1)), |(range, step)| Some((range, step.parse().ok()?)))?;
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first: usize = first.parse().ok()?;
        let last: usize = last.parse().ok()?;
        // The limit keeps a damaged file from allocating memory for billions of ranks.
        if step == 0 || last < first || last / step > 1 << 24 {
            return None;
        }
        found.extend((first..=last).step_by(step));
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_back() {
        for (list, short) in [
            (vec![], ""),
            (vec![7], "7"),
            (vec![3, 4], "3,4"),
            (vec![0, 1, 2, 3, 9, 16, 24, 32], "0-3,9,16-32:8"),
            (vec![0, 5, 7, 100], "0,5,7,100"),
        ] {
            assert_eq!(text(&list), short);
            assert_eq!(numbers(short), Some(list));
        }
        for wrong in ["x", "3-1", "1-9:0", "0-99999999999", "-"] {
            assert_eq!(numbers(wrong), None, "{wrong}");
        }
    }
}
