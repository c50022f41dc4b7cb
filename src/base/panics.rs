//! Catches panics of other crates and reports them as errors.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a panic on this thread is caught by [`caught`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` and catches a panic, which is neither printed nor ends the job. `work` must not
/// leave state inconsistent that is used after a panic.
///
/// # Errors
/// Returns the message if `work` panics on this thread.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let hook = take_hook();
        set_hook(Box::new(move |panic| {
            if !is_caught() {
                hook(panic);
            }
        }));
    });
    let before = IS_CAUGHT.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    IS_CAUGHT.set(before);
    done.map_err(|panic| message(&*panic))
}

/// Returns true if a panic on this thread becomes an error. A panic hook that prints or ends the
/// process should then do nothing.
pub fn is_caught() -> bool {
    IS_CAUGHT.get()
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(catch_panic(|| 1), Ok(1));
        assert_eq!(catch_panic(|| -> u8 { panic!("of a text") }), Err("of a text".into()));
        assert_eq!(catch_panic(|| -> u8 { panic!("number {}", 7) }), Err("number 7".into()));
        assert_eq!(
            catch_panic(|| catch_panic(|| -> u8 { panic!("inside") })),
            Ok(Err("inside".into()))
        );
        assert!(!is_caught());
    }
}
