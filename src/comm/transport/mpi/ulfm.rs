//! User-Level Failure Mitigation (ULFM): calls with which ranks outlive others, in Open MPI 5 started
//! by `mpirun --with-ft ulfm`.
//!
//! Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication
//! capability: Design and rationale" (2013). The functions are looked up at run time, since the
//! headers of other libraries do not declare them. Libraries that have them only as dummies do not
//! set the variable that enables them.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use super::ffi;

/// The variable that `mpirun --with-ft ulfm` sets.
const ENABLED: &str = "OMPI_MCA_mpi_ft_enable";

/// Error classes of Open MPI 5: a process has failed, a receive from any process waits although one
/// has failed, the communicator was revoked.
const LOST: [c_int; 3] = [75, 76, 77];

type OnComm = unsafe extern "C" fn(ffi::MPI_Comm) -> c_int;
type CommOut = unsafe extern "C" fn(ffi::MPI_Comm, *mut ffi::MPI_Comm) -> c_int;
type FlagOut = unsafe extern "C" fn(ffi::MPI_Comm, *mut c_int) -> c_int;
type GroupOut = unsafe extern "C" fn(ffi::MPI_Comm, *mut ffi::MPI_Group) -> c_int;

/// The functions of the library.
pub struct Ulfm {
    revoke: OnComm,
    shrink: CommOut,
    is_revoked: FlagOut,
    get_failed: GroupOut,
}

/// Returns the functions if the launcher has enabled them.
pub fn ulfm() -> Option<&'static Ulfm> {
    static ULFM: OnceLock<Option<Ulfm>> = OnceLock::new();
    ULFM.get_or_init(|| {
        is_enabled().then(|| {
            Some(Ulfm {
                // SAFETY: the types are those of the functions' declarations in mpi-ext.h.
                revoke: unsafe {
                    std::mem::transmute::<*mut c_void, OnComm>(symbol(c"MPIX_Comm_revoke")?)
                },
                // SAFETY: as above.
                shrink: unsafe {
                    std::mem::transmute::<*mut c_void, CommOut>(symbol(c"MPIX_Comm_shrink")?)
                },
                // SAFETY: as above.
                is_revoked: unsafe {
                    std::mem::transmute::<*mut c_void, FlagOut>(symbol(c"MPIX_Comm_is_revoked")?)
                },
                // SAFETY: as above.
                get_failed: unsafe {
                    std::mem::transmute::<*mut c_void, GroupOut>(symbol(c"MPIX_Comm_get_failed")?)
                },
            })
        })?
    })
    .as_ref()
}

/// Returns true if the launcher has enabled ULFM.
pub fn is_enabled() -> bool {
    std::env::var(ENABLED).is_ok_and(|value| value == "1" || value == "true")
}

/// Returns a function of the libraries of this process.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Returns true if a return code says that a rank is gone.
pub fn is_loss(code: c_int) -> bool {
    let mut class = 0;
    // SAFETY: MPI is initialised whenever one of its codes is checked; the out-parameter is a live
    // local.
    unsafe { ffi::MPI_Error_class(code, &mut class) };
    ulfm().is_some() && LOST.contains(&class)
}

impl Ulfm {
    /// Ends all communication of a communicator with an error, on all ranks.
    pub fn revoke(&self, comm: ffi::MPI_Comm) {
        // SAFETY: a communicator of this process. It may be revoked already.
        unsafe { (self.revoke)(comm) };
    }

    /// Returns the return code, and a communicator of the ranks of `comm` that are left. Collective
    /// over them.
    pub fn shrink(&self, comm: ffi::MPI_Comm) -> (c_int, ffi::MPI_Comm) {
        // SAFETY: the out-parameter is a live local.
        unsafe {
            let mut left = ffi::comm_null();
            ((self.shrink)(comm, &mut left), left)
        }
    }

    /// Returns true if a rank of a communicator has failed, or the communicator was revoked.
    pub fn has_failed(&self, comm: ffi::MPI_Comm) -> bool {
        let mut revoked = 0;
        let mut size = 0;
        // SAFETY: out-parameters are live locals; the group is freed.
        unsafe {
            let mut group = ffi::group_null();
            if (self.is_revoked)(comm, &mut revoked) != 0 || revoked != 0 {
                return true;
            }
            if (self.get_failed)(comm, &mut group) != 0 {
                return true;
            }
            ffi::MPI_Group_size(group, &mut size);
            ffi::MPI_Group_free(&mut group);
        }
        size > 0
    }
}
