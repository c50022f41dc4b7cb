//! Glob patterns of names.

use std::fmt;
use std::str::FromStr;

use globset::GlobMatcher;
use serde::{Deserialize, Serialize};

/// A glob pattern that is compared with whole names: of files, or of tensors.
///
/// `*` stands for any characters, `?` for one, `[02-4]` for one of a set of ASCII characters, `{a,b}` for alternatives.
/// Names are not paths: `*` also stands for slashes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern(GlobMatcher);

impl Pattern {
    /// Returns whether the whole of `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        self.0.is_match(name)
    }

    /// Returns the pattern as it was written.
    pub fn as_str(&self) -> &str {
        self.0.glob().glob()
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let glob = globset::Glob::new(text)
            .map_err(|e| format!("`{text}` is not a glob pattern: {}", e.kind()))?;
        Ok(Self(glob.compile_matcher()))
    }
}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.as_str().to_owned()
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Pattern {}

impl fmt::Display for Pattern {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, is_match) in [
            ("train-*.h5", "train-00000.h5", true),
            ("train-*.h5", "train-.h5", true),
            ("train-*.h5", "train-0.h5.tmp", false),
            ("train-*.h5", "x-train-0.h5", false),
            ("*", "", true),
            ("a*b*c", "aXbYbc", true),
            ("a*b*c", "acb", false),
            ("a*c", "a/b/c", true),
            ("*.h5", ".h5", true),
            ("*é", "éé", true),
            ("one.h5", "one.h5", true),
            ("one.h5", "one.h5x", false),
            ("train-0000[013].h5", "train-00001.h5", true),
            ("train-0000[013].h5", "train-00002.h5", false),
            ("train-0000[013].h5", "train-0000.h5", false),
            ("train-000[0-24][0-9].h5", "train-00019.h5", true),
            ("train-000[0-24][0-9].h5", "train-00040.h5", true),
            ("train-000[0-24][0-9].h5", "train-00030.h5", false),
            ("{train,test}-?.h5", "test-1.h5", true),
            ("[!a].h5", "a.h5", false),
        ] {
            let pattern: Pattern = pattern.parse().unwrap();
            assert_eq!(pattern.matches(name), is_match, "{pattern} {name}");
        }
        for pattern in ["[a", "{a,b"] {
            let error = pattern.parse::<Pattern>().unwrap_err();
            assert!(error.starts_with(&format!("`{pattern}` is not a glob pattern: ")), "{error}");
        }
    }
}
