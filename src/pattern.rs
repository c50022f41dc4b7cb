//! Patterns of names.

/// Whether `name` fits `pattern`, in which `*` stands for any characters.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| matches(after, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, fits) in [
            ("train-*.h5", "train-00000.h5", true),
            ("train-*.h5", "train-.h5", true),
            ("train-*.h5", "train-0.h5.tmp", false),
            ("train-*.h5", "x-train-0.h5", false),
            ("*", "", true),
            ("a*b*c", "aXbYbc", true),
            ("a*b*c", "acb", false),
            ("*é", "éé", true),
            ("one.h5", "one.h5", true),
            ("one.h5", "one.h5x", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
