//! C libraries that are opened when the program runs, and tables of their functions. Callers vouch
//! for the types of the functions, which are found by name: that is `unsafe`.

pub use hpctrain_base::error::{Error, Result};
pub use libloading::Library;

use libloading::os::unix;

/// Opens the first of these files that is there.
///
/// # Safety
/// Opening the library runs only sound code.
pub unsafe fn open_first(files: &[&str]) -> Option<Library> {
    let open = |file: &&str| {
        // SAFETY: the caller's promise.
        unsafe { unix::Library::open(Some(*file), unix::RTLD_NOW | unix::RTLD_LOCAL) }.ok()
    };
    files.iter().find_map(open).map(Library::from)
}

/// A table of functions, each by its name in the library and its type there, and as visible as the
/// table.
#[macro_export]
#[doc(hidden)]
macro_rules! library_functions {
    ($(#[$doc:meta])* $vis:vis $table:ident { $($name:ident = $symbol:literal($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$doc])*
        $vis struct $table {
            $($vis $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Looks all of them up.
            ///
            /// # Errors
            /// Returns the error that `missing` makes of the name of a function that is missing.
            ///
            /// # Safety
            /// The functions of these names have these types. They are called only as long as
            /// `library` is open.
            unsafe fn load(
                library: &$crate::library::Library,
                missing: impl Fn(&str) -> $crate::library::Error,
            ) -> $crate::library::Result<Self> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($name: *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol) }
                        .map_err(|_| missing($symbol))?,)*
                })
            }
        }
    };
}
