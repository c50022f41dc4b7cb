//! Patterns of names.

/// Whether `name` fits `pattern`, in which `*` stands for any characters, and `[02-4]` for one of
/// those in brackets: a range has both its ends.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut letters = pattern.chars();
    match letters.next() {
        None => name.is_empty(),
        Some('*') => {
            let rest = letters.as_str();
            name.char_indices()
                .map(|(at, _)| at)
                .chain([name.len()])
                .any(|at| matches(rest, &name[at..]))
        }
        Some(letter) => {
            let mut others = name.chars();
            let Some(first) = others.next() else { return false };
            // A bracket that nothing closes is a letter like others.
            match letters.as_str().split_once(']').filter(|_| letter == '[') {
                Some((set, rest)) => is_in(first, set) && matches(rest, others.as_str()),
                None => first == letter && matches(letters.as_str(), others.as_str()),
            }
        }
    }
}

/// Whether a letter is in a set of letters and ranges of letters.
fn is_in(letter: char, set: &str) -> bool {
    let mut letters = set.chars();
    while let Some(first) = letters.next() {
        let rest = letters.as_str();
        let last = rest.strip_prefix('-').and_then(|rest| rest.chars().next());
        if let Some(last) = last {
            letters.nth(1);
            if (first..=last).contains(&letter) {
                return true;
            }
        } else if first == letter {
            return true;
        }
    }
    false
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
            ("train-0000[013].h5", "train-00001.h5", true),
            ("train-0000[013].h5", "train-00002.h5", false),
            ("train-0000[013].h5", "train-0000.h5", false),
            ("train-000[0-24][0-9].h5", "train-00019.h5", true),
            ("train-000[0-24][0-9].h5", "train-00040.h5", true),
            ("train-000[0-24][0-9].h5", "train-00030.h5", false),
            ("*[a-]*", "x-y", true),
            ("[é]", "é", true),
            ("[]", "]", false),
            ("[a", "[a", true),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
