//! Near misses of names.

use strsim::levenshtein;

/// Returns "did you mean `steps`? " for a near miss of a known name, else an empty string.
pub(super) fn did_you_mean(name: &str, known: &[&str]) -> String {
    let nearest = known.iter().min_by_key(|candidate| levenshtein(name, candidate));
    match nearest {
        Some(nearest) if levenshtein(name, nearest) <= name.len().div_ceil(2) => {
            format!("did you mean `{nearest}`? ")
        }
        _ => String::new(),
    }
}
