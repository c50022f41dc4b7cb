//! C libraries that are looked for when the program runs, and their functions by name.

use std::ffi::{CStr, c_void};

pub use hpctrain_base::error::{Error, Result};

/// The first of these files that is there, opened for as long as the process lives.
///
/// # Safety
/// Opening the library runs only sound code.
pub unsafe fn open(files: &[&CStr]) -> Option<*mut c_void> {
    // SAFETY: the names end in zeros; the rest is the caller's promise.
    let mut files = files.iter().map(|file| unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) });
    files.find(|file| !file.is_null())
}

/// The address of a function, or the error that `missing` makes of its name.
///
/// # Safety
/// `file` is an open library.
pub unsafe fn symbol(
    file: *mut c_void,
    name: &CStr,
    missing: impl FnOnce(&str) -> Error,
) -> Result<*mut c_void> {
    // SAFETY: the caller's promise, and a name that ends in a zero.
    let found = unsafe { libc::dlsym(file, name.as_ptr()) };
    if found.is_null() { Err(missing(&name.to_string_lossy())) } else { Ok(found) }
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
            /// All of them.
            ///
            /// # Safety
            /// `file` is an open library, whose functions of these names have these types.
            unsafe fn of(
                file: *mut std::ffi::c_void,
                missing: impl Fn(&str) -> $crate::library::Error,
            ) -> $crate::library::Result<Self> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($name: unsafe {
                        std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>(
                            $crate::library::symbol(file, $symbol, &missing)?,
                        )
                    },)*
                })
            }
        }
    };
}
