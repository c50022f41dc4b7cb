//! The functions and constants of MPI: by the crate `mpi`, of the library that the program is linked
//! with (feature `linked-mpi`), or of a library that is opened at run time (`library.rs`).

#[cfg(not(feature = "linked-mpi"))]
pub use super::library::*;
#[cfg(feature = "linked-mpi")]
pub use linked::*;

#[cfg(feature = "linked-mpi")]
mod linked {
    use std::ffi::{c_int, c_void};

    use hpctrain_base::error::Result;
    pub use mpi::ffi::*;

    /// Does nothing: the system has opened the library.
    ///
    /// # Errors
    /// Never.
    pub fn open() -> Result<()> {
        Ok(())
    }

    /// Returns the path of a library that was opened at run time: none.
    pub fn opened_path() -> Option<&'static str> {
        None
    }

    /// Defines functions that return constants of the library.
    macro_rules! constants {
        ($($name:ident: $rust:ty = $linked:ident;)*) => {
            $(
                /// Returns the constant of this name.
                pub fn $name() -> $rust {
                    // SAFETY: reading a constant of the library.
                    unsafe { $linked }
                }
            )*
        };
    }

    constants! {
        comm_world: MPI_Comm = RSMPI_COMM_WORLD;
        comm_self: MPI_Comm = RSMPI_COMM_SELF;
        comm_null: MPI_Comm = RSMPI_COMM_NULL;
        request_null: MPI_Request = RSMPI_REQUEST_NULL;
        group_null: MPI_Group = RSMPI_GROUP_NULL;
        info_null: MPI_Info = RSMPI_INFO_NULL;
        float: MPI_Datatype = RSMPI_FLOAT;
        uint8_t: MPI_Datatype = RSMPI_UINT8_T;
        int32_t: MPI_Datatype = RSMPI_INT32_T;
        sum: MPI_Op = RSMPI_SUM;
        min: MPI_Op = RSMPI_MIN;
        errors_return: MPI_Errhandler = RSMPI_ERRORS_RETURN;
        comm_type_shared: c_int = RSMPI_COMM_TYPE_SHARED;
        thread_single: c_int = RSMPI_THREAD_SINGLE;
        thread_funneled: c_int = RSMPI_THREAD_FUNNELED;
        thread_serialized: c_int = RSMPI_THREAD_SERIALIZED;
        thread_multiple: c_int = RSMPI_THREAD_MULTIPLE;
        in_place: *const c_void = HPCTRAIN_MPI_IN_PLACE;
    }

    unsafe extern "C" {
        /// `MPI_IN_PLACE`, a macro, which bindings cannot see; defined in `constants.c`.
        static HPCTRAIN_MPI_IN_PLACE: *const c_void;
    }
}
