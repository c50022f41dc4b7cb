//! Words of a shell, and values of directives, that mean only what they say.

use crate::error::{Error, Result};

/// Characters that a shell takes as they are, besides letters and digits.
const PLAIN: &str = "_@%+=:,./-";

/// Returns an error if a text would not stay in its line.
pub(super) fn check_line(what: &str, text: &str) -> Result<()> {
    if text.contains(char::is_control) {
        return Err(Error::input(format!("{what} = {text:?} has a control character"))
            .hint("write it in one line of printable text"));
    }
    Ok(())
}

/// Returns a word in quotes, if the shell would change it without.
///
/// # Errors
/// Returns an error if it has control characters.
pub(super) fn quote(word: &str) -> Result<String> {
    check_line("a word of the job script", word)?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || PLAIN.contains(c);
    Ok(match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    })
}

/// Returns words in one line, each in quotes where it needs them.
///
/// # Errors
/// Returns an error under the conditions of [`quote`].
pub(super) fn quote_all<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<String> {
    let quoted: Result<Vec<String>> = words.into_iter().map(quote).collect();
    Ok(quoted?.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_reads_the_words_that_were_quoted() {
        let words = [
            "plain",
            "run.root=/a/b",
            "a b",
            "",
            "it's",
            "$HOME",
            "`id`",
            "a\\b",
            "*",
            "~",
            "é; rm x",
            "#",
            "!x",
            "model.layers=[{kind='relu'}]",
        ];
        let script = format!("printf '%s\\n' {}", quote_all(words).unwrap());
        let ended = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
        let printed = String::from_utf8(ended.stdout).unwrap();
        assert_eq!(printed.lines().collect::<Vec<_>>(), words);
        assert_eq!(quote("run.root=/a/b-c").unwrap(), "run.root=/a/b-c");
    }

    #[test]
    fn control_characters_are_refused() {
        for word in ["a\nb", "\t", "\u{1b}[0m", "a\r", "\0"] {
            let error = quote(word).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("control character\nhint: "), "{error}");
        }
    }
}
