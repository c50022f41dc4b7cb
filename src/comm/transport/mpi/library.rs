//! The MPI library, opened at run time: one program runs with Open MPI, MPICH and its descendants,
//! and libraries with the standard ABI of MPI 5.
//!
//! There are three binary interfaces. Handles are pointers in Open MPI and in the standard ABI, and
//! ints in MPICH; here they are words, which each call converts. Constants are addresses of symbols
//! in Open MPI, and numbers in the others.
//!
//! The library is searched by name, that of the launcher's family first. It is opened with
//! `RTLD_GLOBAL`, because Open MPI's components look its symbols up there, and its functions are
//! looked up among all symbols of the process, so that a preloaded tool sees the calls. A process has
//! one MPI library: where another one is loaded already, for example by a parallel HDF5, that one is
//! used, or refused if the user has named a different one.

#![allow(
    non_camel_case_types,
    non_snake_case,
    clippy::too_many_arguments,
    reason = "names and parameters of the MPI standard"
)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::environment::MPI_LIBRARY;
use hpctrain_base::error::{Error, Result};

/// A function by the name that tools do not replace.
const PROFILED: &CStr = c"PMPI_Init_thread";

/// The names of Open MPI's library, and of those of MPICH and its descendants: their own interface
/// before the standard ABI, which has no question whether a library is CUDA-aware.
const OPEN_MPI: [&str; 1] = ["libmpi.so.40"];
const MPICH: [&str; 3] = ["libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"];

/// A binary interface of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interface {
    OpenMpi,
    Mpich,
    /// The ABI of the MPI 5 standard.
    Standard,
}

/// Defines handles, each a pointer of Open MPI or of the standard ABI, or a sign-extended int of
/// MPICH.
macro_rules! handles {
    ($($name:ident)*) => {
        $(
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            #[repr(transparent)]
            pub struct $name(isize);

            impl From<isize> for $name {
                fn from(word: isize) -> Self {
                    Self(word)
                }
            }

            impl From<Word> for $name {
                fn from(Word(word): Word) -> Self {
                    Self(word)
                }
            }

            impl From<$name> for isize {
                fn from(handle: $name) -> Self {
                    handle.0
                }
            }
        )*
    };
}

handles! { MPI_Comm MPI_Datatype MPI_Op MPI_Request MPI_Info MPI_Errhandler MPI_Group }

/// A status. It is larger than that of any library: those have 20 to 32 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub struct MPI_Status([u8; 64]);

/// The representation of a handle in an interface.
trait Handle: Copy {
    fn from_word(word: isize) -> Self;
    fn word(self) -> isize;
}

impl Handle for c_int {
    fn from_word(word: isize) -> Self {
        word as c_int
    }

    fn word(self) -> isize {
        self as isize
    }
}

impl Handle for *mut c_void {
    fn from_word(word: isize) -> Self {
        std::ptr::with_exposed_provenance_mut(word.cast_unsigned())
    }

    fn word(self) -> isize {
        self.expose_provenance().cast_signed()
    }
}

/// The type of a parameter in C: `h` is a handle, `io` a handle that the call changes, `v` anything
/// else.
macro_rules! c_type {
    (h $rust:ty, $handle:ident) => { $handle };
    (io $rust:ty, $handle:ident) => { *mut $handle };
    (v $rust:ty, $handle:ident) => { $rust };
}

/// The type of a parameter in Rust.
macro_rules! rust_type {
    (io $rust:ty) => { *mut $rust };
    ($kind:ident $rust:ty) => { $rust };
}

/// Converts an argument before a call. A handle that the call changes is converted in place, where
/// it has room for either form.
macro_rules! before {
    (h $argument:ident, $handle:ty) => {
        <$handle as Handle>::from_word($argument.into())
    };
    (v $argument:ident, $handle:ty) => {
        $argument
    };
    (io $argument:ident, $handle:ty) => {{
        let place = $argument.cast::<$handle>();
        // The caller passes a live handle, a word, which has room for a pointer or an int.
        place.write(<$handle as Handle>::from_word((*$argument).into()));
        place
    }};
}

/// Converts a handle back that a call has changed.
macro_rules! after {
    (io $argument:ident, $handle:ty) => {
        // SAFETY: `before!` and the call have written the handle there.
        unsafe { *$argument = $argument.cast::<$handle>().read().word().into() }
    };
    ($kind:ident $argument:ident, $handle:ty) => {};
}

/// Defines the functions, and the table with their addresses.
macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ident $rust:ty),*);)*) => {
        /// The functions of an interface whose handles are `H`.
        struct Functions<H> {
            $($name: unsafe extern "C" fn($(c_type!($kind $rust, H)),*) -> c_int,)*
        }

        impl<H> Functions<H> {
            fn find(find: &dyn Fn(&str) -> Result<*mut c_void>) -> Result<Self> {
                Ok(Self {
                    $(
                        // SAFETY: the function has this type in the interface with handles `H`.
                        $name: unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($(c_type!($kind $rust, H)),*) -> c_int,
                            >(find(stringify!($name))?)
                        },
                    )*
                })
            }
        }

        $(
            /// The function of this name in the MPI standard.
            ///
            /// # Safety
            /// The same as for the function in C. [`open`] has succeeded.
            pub unsafe fn $name($($argument: rust_type!($kind $rust)),*) -> c_int {
                match &opened().functions {
                    Table::Ints(table) => {
                        // SAFETY: as the caller promises.
                        let code = unsafe { (table.$name)($(before!($kind $argument, c_int)),*) };
                        $(after!($kind $argument, c_int);)*
                        code
                    }
                    Table::Pointers(table) => {
                        // SAFETY: as the caller promises.
                        let code = unsafe { (table.$name)($(before!($kind $argument, *mut c_void)),*) };
                        $(after!($kind $argument, *mut c_void);)*
                        code
                    }
                }
            }
        )*

        /// The names of the functions.
        #[cfg(test)]
        const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];
    };
}

functions! {
    MPI_Abort(comm: h MPI_Comm, code: v c_int);
    MPI_Allgather(
        from: v *const c_void, count: v c_int, of: h MPI_Datatype, to: v *mut c_void,
        received: v c_int, received_of: h MPI_Datatype, comm: h MPI_Comm
    );
    MPI_Allreduce(
        from: v *const c_void, to: v *mut c_void, count: v c_int, of: h MPI_Datatype,
        op: h MPI_Op, comm: h MPI_Comm
    );
    MPI_Bcast(
        at: v *mut c_void, count: v c_int, of: h MPI_Datatype, root: v c_int, comm: h MPI_Comm
    );
    MPI_Comm_dup(comm: h MPI_Comm, new: io MPI_Comm);
    MPI_Comm_rank(comm: h MPI_Comm, rank: v *mut c_int);
    MPI_Comm_set_errhandler(comm: h MPI_Comm, handler: h MPI_Errhandler);
    MPI_Comm_size(comm: h MPI_Comm, size: v *mut c_int);
    MPI_Comm_split(comm: h MPI_Comm, color: v c_int, key: v c_int, new: io MPI_Comm);
    MPI_Comm_split_type(
        comm: h MPI_Comm, kind: v c_int, key: v c_int, info: h MPI_Info, new: io MPI_Comm
    );
    MPI_Error_class(code: v c_int, class: v *mut c_int);
    MPI_Error_string(code: v c_int, text: v *mut c_char, len: v *mut c_int);
    MPI_Finalize();
    MPI_Get_count(status: v *const MPI_Status, of: h MPI_Datatype, count: v *mut c_int);
    MPI_Get_library_version(text: v *mut c_char, len: v *mut c_int);
    MPI_Get_processor_name(text: v *mut c_char, len: v *mut c_int);
    MPI_Get_version(version: v *mut c_int, subversion: v *mut c_int);
    MPI_Group_free(group: io MPI_Group);
    MPI_Group_size(group: h MPI_Group, size: v *mut c_int);
    MPI_Init_thread(
        argc: v *mut c_int, argv: v *mut *mut *mut c_char, wanted: v c_int, provided: v *mut c_int
    );
    MPI_Initialized(flag: v *mut c_int);
    MPI_Irecv(
        to: v *mut c_void, count: v c_int, of: h MPI_Datatype, source: v c_int, tag: v c_int,
        comm: h MPI_Comm, request: io MPI_Request
    );
    MPI_Isend(
        from: v *const c_void, count: v c_int, of: h MPI_Datatype, dest: v c_int, tag: v c_int,
        comm: h MPI_Comm, request: io MPI_Request
    );
    MPI_Reduce(
        from: v *const c_void, to: v *mut c_void, count: v c_int, of: h MPI_Datatype,
        op: h MPI_Op, root: v c_int, comm: h MPI_Comm
    );
    MPI_Reduce_scatter_block(
        from: v *const c_void, to: v *mut c_void, count: v c_int, of: h MPI_Datatype,
        op: h MPI_Op, comm: h MPI_Comm
    );
    MPI_Sendrecv(
        from: v *const c_void, count: v c_int, of: h MPI_Datatype, dest: v c_int, tag: v c_int,
        to: v *mut c_void, received: v c_int, received_of: h MPI_Datatype, source: v c_int,
        received_tag: v c_int, comm: h MPI_Comm, status: v *mut MPI_Status
    );
    MPI_Test(request: io MPI_Request, flag: v *mut c_int, status: v *mut MPI_Status);
}

/// The functions of the library.
enum Table {
    Ints(Functions<c_int>),
    Pointers(Functions<*mut c_void>),
}

/// Defines the constants: their types, the symbols or numbers of Open MPI, and the numbers of MPICH
/// and of the standard ABI.
macro_rules! constants {
    ($($name:ident: $rust:ty = $open_mpi:literal, $mpich:literal, $standard:literal;)*) => {
        /// The constants of a library as words.
        #[derive(Debug, PartialEq, Eq)]
        struct Constants {
            $($name: isize,)*
        }

        impl Constants {
            fn new(interface: Interface, find: &dyn Fn(&str) -> Result<*mut c_void>) -> Result<Self> {
                let word = |open_mpi: &str, mpich: u32, standard: isize| match interface {
                    Interface::Mpich => Ok(mpich.cast_signed() as isize),
                    Interface::Standard => Ok(standard),
                    Interface::OpenMpi => match open_mpi.parse() {
                        Ok(number) => Ok(number),
                        Err(_) => find(open_mpi).map(Handle::word),
                    },
                };
                Ok(Self { $($name: word($open_mpi, $mpich, $standard)?,)* })
            }

            /// Returns the names of the constants and their words.
            #[cfg(test)]
            fn named(&self) -> Vec<(&'static str, isize)> {
                Vec::from([$((stringify!($name), self.$name)),*])
            }

            /// Returns the names of the constants and their symbols or numbers in Open MPI.
            #[cfg(test)]
            fn symbols() -> Vec<(&'static str, &'static str)> {
                Vec::from([$((stringify!($name), $open_mpi)),*])
            }
        }

        $(
            /// Returns the constant of this name in the library that [`open`] has opened.
            pub fn $name() -> $rust {
                Word(opened().constants.$name).into()
            }
        )*
    };
}

constants! {
    comm_world: MPI_Comm = "ompi_mpi_comm_world", 0x4400_0000, 0x101;
    comm_self: MPI_Comm = "ompi_mpi_comm_self", 0x4400_0001, 0x102;
    comm_null: MPI_Comm = "ompi_mpi_comm_null", 0x0400_0000, 0x100;
    request_null: MPI_Request = "ompi_request_null", 0x2c00_0000, 0x180;
    group_null: MPI_Group = "ompi_mpi_group_null", 0x0800_0000, 0x108;
    info_null: MPI_Info = "ompi_mpi_info_null", 0x1c00_0000, 0x130;
    float: MPI_Datatype = "ompi_mpi_float", 0x4c00_040a, 0x210;
    uint8_t: MPI_Datatype = "ompi_mpi_uint8_t", 0x4c00_013b, 0x241;
    int32_t: MPI_Datatype = "ompi_mpi_int32_t", 0x4c00_0439, 0x250;
    sum: MPI_Op = "ompi_mpi_op_sum", 0x5800_0003, 0x21;
    min: MPI_Op = "ompi_mpi_op_min", 0x5800_0002, 0x22;
    errors_return: MPI_Errhandler = "ompi_mpi_errors_return", 0x5400_0001, 0x143;
    comm_type_shared: c_int = "0", 1, 221;
    thread_single: c_int = "0", 0, 0;
    thread_funneled: c_int = "1", 1, 1024;
    thread_serialized: c_int = "2", 2, 2048;
    thread_multiple: c_int = "3", 3, 4096;
    in_place: *const c_void = "1", 0xffff_ffff, 1;
}

/// A constant as a word.
struct Word(isize);

impl From<Word> for c_int {
    fn from(Word(word): Word) -> Self {
        word as c_int
    }
}

impl From<Word> for *const c_void {
    fn from(Word(word): Word) -> Self {
        std::ptr::without_provenance(word.cast_unsigned())
    }
}

/// The library of this process.
struct Library {
    /// The path of its file, or the name that it was opened by.
    path: String,
    functions: Table,
    constants: Constants,
}

static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();

/// Opens the library, the first time. It must succeed before any other function of this module is
/// called.
///
/// # Errors
/// Returns an error if no library can be opened, or one lacks a function.
pub fn open() -> Result<()> {
    let env = |name: &str| std::env::var(name).ok();
    LIBRARY
        .get_or_init(|| open_one_of(&candidates(env, loaded()), launcher(env)))
        .as_ref()
        .map(drop)
        .map_err(Clone::clone)
}

/// Returns the path of the library that was opened at run time, if one was.
pub fn opened_path() -> Option<&'static str> {
    Some(&LIBRARY.get()?.as_ref().ok()?.path)
}

/// Returns the library that [`open`] has opened.
fn opened() -> &'static Library {
    match LIBRARY.get() {
        Some(Ok(library)) => library,
        // No caller gets here: each has a communicator, or has called `open`.
        _ => std::process::abort(),
    }
}

/// The family of MPI libraries that a launcher belongs to, and the launcher's name for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launcher {
    /// Open MPI's mpirun, which no other library understands.
    OpenMpi,
    /// PMIx, which Open MPI's libraries and newer ones of MPICH's family speak.
    Pmix,
    /// PMI, mostly of MPICH's family.
    Pmi,
    Unknown,
}

impl Launcher {
    fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "Open MPI's mpirun",
            Self::Pmix => "a launcher that speaks PMIx",
            Self::Pmi => "a launcher that speaks PMI, such as MPICH's mpiexec",
            Self::Unknown => "a launcher of unknown family",
        }
    }
}

fn launcher(env: impl Fn(&str) -> Option<String>) -> Launcher {
    let is_set = |name| env(name).is_some();
    match () {
        () if is_set("OMPI_COMM_WORLD_SIZE") => Launcher::OpenMpi,
        () if is_set("PMIX_RANK") => Launcher::Pmix,
        () if is_set("PMI_RANK") || is_set("PALS_RANKID") => Launcher::Pmi,
        () => Launcher::Unknown,
    }
}

/// Returns the path of an MPI library that this process has loaded already. Tools that see the calls
/// replace the names without P only.
fn loaded() -> Option<String> {
    // SAFETY: a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, PROFILED.as_ptr()) };
    if found.is_null() { None } else { file_of(found) }
}

/// Returns the names to try, in this order: the file that the user names, the library that is
/// `loaded` already, or those of the launcher's family, then those of the other one.
fn candidates(env: impl Fn(&str) -> Option<String>, loaded: Option<String>) -> Vec<String> {
    let named = env(MPI_LIBRARY).filter(|path| !path.is_empty());
    if let Some(path) = named.or(loaded) {
        return vec![path];
    }
    let (open_mpi, mpich) = (OPEN_MPI.iter(), MPICH.iter());
    let names: Vec<&&str> = match launcher(env) {
        Launcher::OpenMpi => open_mpi.collect(),
        Launcher::Pmix | Launcher::Unknown => open_mpi.chain(mpich).collect(),
        Launcher::Pmi => mpich.chain(open_mpi).collect(),
    };
    names.into_iter().map(|name| (*name).to_string()).collect()
}

/// Returns the last error of `dlopen` or `dlsym`.
fn last_error() -> String {
    // SAFETY: the text is copied before another call of this thread replaces it.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".into();
    }
    // SAFETY: not null, so it is a C string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Opens the first of these libraries that can be opened.
fn open_one_of(names: &[String], launcher: Launcher) -> Result<Library> {
    let mut reasons = Vec::new();
    for name in names {
        let Ok(text) = CString::new(name.as_str()) else { continue };
        // SAFETY: a C string. The library's initialisers are as trusted as a linked library's.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            reasons.push(last_error());
            continue;
        }
        return from_handle(name, handle);
    }
    let although = match launcher {
        Launcher::Unknown => String::new(),
        launcher => format!(", although {} started this process", launcher.name()),
    };
    Err(Error::input(format!(
        "no MPI library was found{although}: {}",
        reasons.join("; ")
    ))
    .hint(format!(
        "load the MPI module of the site, or set {MPI_LIBRARY} to the path of libmpi.so; without MPI: \
         hpctrain train --spawn N"
    )))
}

/// Finds the functions and constants of an open library.
fn from_handle(name: &str, handle: *mut c_void) -> Result<Library> {
    let in_library = |symbol: &str| {
        let text = CString::new(symbol).ok()?;
        // SAFETY: an open library and a C string.
        let found = unsafe { libc::dlsym(handle, text.as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    // SAFETY: C strings, an open library and the symbols of the process.
    let [own, first] =
        [handle, libc::RTLD_DEFAULT].map(|among| unsafe { libc::dlsym(among, PROFILED.as_ptr()) });
    if own.is_null() {
        return Err(Error::input(format!("{name} is not an MPI library"))
            .hint(format!("set {MPI_LIBRARY} to the path of libmpi.so")));
    }
    if own != first {
        let first = file_of(first).unwrap_or_else(|| "another library".into());
        return Err(Error::input(format!(
            "{name} cannot be used, since this process has loaded {first} already"
        ))
        .hint(format!("set {MPI_LIBRARY}={first}, or use a serial HDF5")));
    }
    let interface = match in_library("MPI_Abi_get_version") {
        _ if in_library("ompi_mpi_comm_world").is_some() => Interface::OpenMpi,
        Some(query) if has_standard_abi(query) => Interface::Standard,
        _ => Interface::Mpich,
    };
    // Preloaded tools come before the library.
    let find = |symbol: &str| {
        let text = CString::new(symbol).map_err(|e| Error::internal(e.to_string()))?;
        // SAFETY: a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, text.as_ptr()) };
        if found.is_null() {
            return Err(Error::input(format!("{name} has no {symbol}"))
                .hint(format!("set {MPI_LIBRARY} to the path of a later version")));
        }
        Ok(found)
    };
    let functions = match interface {
        Interface::Mpich => Table::Ints(Functions::find(&find)?),
        Interface::OpenMpi | Interface::Standard => Table::Pointers(Functions::find(&find)?),
    };
    let path = file_of(own).unwrap_or_else(|| name.to_string());
    log::debug!("{path} was opened, which has the interface of {interface:?}");
    Ok(Library { path, functions, constants: Constants::new(interface, &find)? })
}

/// Returns the path of the file that a function comes from.
fn file_of(function: *mut c_void) -> Option<String> {
    // SAFETY: all fields of the structure may be zero.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for; the out-parameter is a live local.
    if unsafe { libc::dladdr(function, &mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string that lives as long as the library, which is never closed.
    Some(unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy().into_owned())
}

/// Returns whether the function `MPI_Abi_get_version` says that handles and constants are those of
/// the standard. MPICH's own interface has the function, too.
fn has_standard_abi(query: *mut c_void) -> bool {
    // SAFETY: the type of the function in the MPI 5 standard.
    let query: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
        unsafe { std::mem::transmute(query) };
    let mut major = -1;
    let mut minor = -1;
    // SAFETY: the standard allows the call at any time; the parameters are live locals.
    unsafe { query(&mut major, &mut minor) };
    major >= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(variables: &[(&str, &str)]) -> Vec<String> {
        let env = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_string())
        };
        let loaded = candidates(env, Some("/there/libmpi.so.12".into()));
        assert_eq!(loaded, [env(MPI_LIBRARY).unwrap_or("/there/libmpi.so.12".into())]);
        candidates(env, None)
    }

    #[test]
    fn the_library_of_the_launchers_family_comes_first() {
        assert_eq!(names(&[("OMPI_COMM_WORLD_SIZE", "2")]), OPEN_MPI);
        assert_eq!(names(&[("PMI_RANK", "0")])[..3], MPICH);
        assert_eq!(names(&[("PMIX_RANK", "0")])[..1], OPEN_MPI);
        assert_eq!(names(&[("PMI_RANK", "0"), (MPI_LIBRARY, "/x/libmpi.so")]), ["/x/libmpi.so"]);
    }

    /// Writes a C program that prints the constants of `mpi.h`: of Open MPI whether they are the symbols
    /// of [`Constants`], and their numbers.
    fn program() -> String {
        let mut lines = String::new();
        for (name, symbol) in Constants::symbols() {
            let in_c = format!("MPI_{}", name.to_uppercase());
            let is_symbol = symbol.parse::<isize>().is_err();
            lines += "#ifdef OPEN_MPI\n";
            if is_symbol {
                lines +=
                    &format!("printf(\"{name} %d\\n\", (void *){in_c} == (void *)&{symbol});\n");
            } else {
                lines += &format!("printf(\"{name} %ld\\n\", (long){in_c});\n");
            }
            lines += &format!("#else\nprintf(\"{name} %ld\\n\", (long){in_c});\n#endif\n");
        }
        format!(
            "#include <mpi.h>\n#include <stdio.h>\nint main(void) {{\n{lines}\
             printf(\"status %ld\\n\", (long)sizeof(MPI_Status));\n\
             printf(\"aint %ld\\n\", (long)sizeof(MPI_Aint));\nreturn 0;\n}}\n"
        )
    }

    /// Compares the constants with those of the headers of the MPI libraries that are installed.
    #[test]
    fn the_constants_are_those_of_the_headers() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("constants.c");
        std::fs::write(&source, program()).unwrap();
        let mut compared = 0;
        for compiler in ["mpicc", "mpicc.openmpi", "mpicc.mpich", "mpicc_abi"] {
            let out = folder.path().join(compiler);
            let built =
                std::process::Command::new(compiler).arg("-o").arg(&out).arg(&source).output();
            let Ok(built) = built else { continue };
            assert!(
                built.status.success(),
                "{compiler}: {}",
                String::from_utf8_lossy(&built.stderr)
            );
            let printed = std::process::Command::new(&out).output().unwrap();
            let printed = String::from_utf8(printed.stdout).unwrap();
            let found: Vec<(&str, isize)> = printed
                .lines()
                .map(|line| line.split_once(' ').unwrap())
                .map(|(name, number)| (name, number.parse().unwrap()))
                .collect();
            let number = |name: &str| found.iter().find(|(other, _)| *other == name).unwrap().1;
            let interface = match (number("comm_type_shared"), number("comm_world")) {
                (0, _) => Interface::OpenMpi,
                (_, 0x101) => Interface::Standard,
                _ => Interface::Mpich,
            };
            // Addresses of Open MPI's symbols stand for true.
            let constants = Constants::new(interface, &|_| Ok(std::ptr::without_provenance_mut(1)));
            for (name, word) in constants.unwrap().named() {
                assert_eq!(number(name), word, "{compiler}: {name}");
            }
            assert!(number("status") as usize <= size_of::<MPI_Status>(), "{compiler}");
            assert_eq!(number("aint") as usize, size_of::<isize>(), "{compiler}");
            compared += 1;
        }
        assert!(compared > 0 || !cfg!(feature = "linked-mpi"), "no compiler of MPI was found");
        println!("{compared} compilers, {} functions", FUNCTIONS.len());
    }

    #[test]
    fn a_missing_library_is_named() {
        let missing = ["/none/libmpi.so.40".to_string()];
        let Err(error) = open_one_of(&missing, Launcher::OpenMpi) else { panic!() };
        let text = error.to_string();
        assert!(
            text.contains("/none/libmpi.so.40") && text.contains("Open MPI's mpirun"),
            "{text}"
        );
        assert!(text.contains("hint: ") && text.contains(MPI_LIBRARY), "{text}");
        let other = ["libc.so.6".to_string()];
        let Err(error) = open_one_of(&other, Launcher::Unknown) else { panic!() };
        assert!(error.to_string().contains("libc.so.6 is not an MPI library"), "{error}");
    }
}
