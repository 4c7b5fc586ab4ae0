//! Calls of the library: handles that close themselves, errors, panics, strings and arrays. Each
//! call of the library that can fail goes through [`call`], [`Owned::open`] or [`fill`].
use std::any::Any;
use std::cell::Cell;
use std::ffi::CString;
use std::mem::{size_of, ManuallyDrop, MaybeUninit};
use std::ops::ControlFlow;
use std::os::raw::c_char;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::path::Path;
use std::ptr::{null_mut, NonNull};
use std::thread;

use kvasir_sys as sys;

use crate::{Error, Result};

// ---- panics ----

thread_local! {
    /// The panic of a callback, which must not unwind through the library's frames. Callbacks run
    /// on the calling thread.
    static PANIC: Cell<Option<Box<dyn Any + Send>>> = Cell::new(None);
}

/// Runs a callback. One that panics, and any after it, stops the call. `resume` continues the panic
/// when the call has returned.
pub(crate) fn callback(f: impl FnOnce() -> ControlFlow<()>) -> i32 {
    if panicked() {
        return 1;
    }
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(ControlFlow::Continue(())) => 0,
        Ok(ControlFlow::Break(())) => 1,
        Err(panic) => {
            let panic = ManuallyDrop::new(panic); // dropping it could panic again
            let _ = PANIC.try_with(|kept| kept.set(Some(ManuallyDrop::into_inner(panic))));
            1
        }
    }
}

fn panicked() -> bool {
    PANIC
        .try_with(|kept| {
            let panic = kept.take();
            let there = panic.is_some();
            kept.set(panic);
            there
        })
        .unwrap_or(false)
}

fn resume() {
    if let Ok(Some(panic)) = PANIC.try_with(Cell::take) {
        resume_unwind(panic);
    }
}

// ---- calls ----

/// Makes one call. Returns its status and `kv_error` as a result. Continues a panic of a callback.
pub(crate) fn call(f: impl FnOnce(*mut sys::kv_error) -> sys::kv_status) -> Result<()> {
    let mut error = empty_error();
    let status = f(&mut error);
    resume();
    check(status, &error)
}

pub(crate) fn empty_error() -> sys::kv_error {
    // SAFETY: zeros are valid for its fields, which are numbers.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn check(status: sys::kv_status, error: &sys::kv_error) -> Result<()> {
    if status == sys::KV_OK as sys::kv_status {
        Ok(())
    } else {
        Err(Error::reported(status, error))
    }
}

/// A handle of the library, and its close function.
pub(crate) trait Handle {
    /// # Safety
    /// `raw` is open, and nothing uses it afterwards.
    unsafe fn close(raw: *mut Self);
}

macro_rules! handles {
    ($($raw:ident: $close:ident,)*) => {
        $(impl Handle for sys::$raw {
            unsafe fn close(raw: *mut Self) {
                // SAFETY: as the trait says.
                unsafe { sys::$close(raw) }
            }
        })*
    };
}

handles! {
    kv_model: kv_close,
    kv_session: kv_session_close,
    kv_library: kv_library_close,
    kv_cache: kv_cache_close,
    kv_cancel: kv_cancel_release,
    kv_strategy: kv_strategy_destroy,
}

/// An open handle, closed when it is dropped.
pub(crate) struct Owned<T: Handle>(NonNull<T>);

// SAFETY: any thread may call any of the handles, at the same time too. Models, libraries and
// cancel tokens serve any number of threads. Sessions and caches return KV_BUSY to a second
// concurrent call. Nothing changes a strategy after its creation. Closing takes the handle by
// value, so no call runs.
unsafe impl<T: Handle> Send for Owned<T> {}
unsafe impl<T: Handle> Sync for Owned<T> {}

impl<T: Handle> Owned<T> {
    /// Makes a call whose output is a handle.
    pub(crate) fn open(
        f: impl FnOnce(*mut *mut T, *mut sys::kv_error) -> sys::kv_status,
    ) -> Result<Owned<T>> {
        let (mut out, mut error) = (null_mut(), empty_error());
        let status = f(&mut out, &mut error);
        let owned = NonNull::new(out).map(Owned); // before `resume`, whose panic closes it
        resume();
        check(status, &error)?;
        owned.ok_or_else(|| {
            Error::found(sys::KV_INTERNAL, "the library returned no handle".into(), None)
        })
    }

    pub(crate) fn raw(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl Clone for Owned<sys::kv_model> {
    fn clone(&self) -> Self {
        // SAFETY: the model is open. The clone closes the reference. The pointer is the same.
        unsafe { sys::kv_model_retain(self.raw()) };
        Owned(self.0)
    }
}

impl<T: Handle> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and `self` is its only owner.
        unsafe { T::close(self.raw()) };
        if !thread::panicking() {
            resume();
        }
    }
}

// ---- structs, arrays and strings ----

/// A C struct whose first field is its size.
///
/// # Safety
/// Its fields are numbers and pointers, for which zeros are valid. The first is `struct_size`.
pub(crate) unsafe trait Sized32: Sized {}

macro_rules! sized {
    ($($raw:ident)*) => { $(unsafe impl Sized32 for sys::$raw {})* };
}

sized! {
    kv_control kv_model_options kv_session_options kv_generate_options kv_library_options
    kv_library_session_options kv_cache_options kv_cache_attention_options kv_cache_shape
    kv_model_info kv_strategy_info kv_answer kv_session_stats kv_cache_stats kv_file_info
    kv_file_document kv_compose_options kv_session_document
    kv_packed_info kv_library_document kv_library_result kv_checkpoint
}

/// A struct with its size and otherwise zeros, which are the defaults, as `kv_init` makes it.
pub(crate) fn sized<T: Sized32>() -> T {
    let mut out = MaybeUninit::<T>::zeroed();
    // SAFETY: as the trait says.
    unsafe {
        out.as_mut_ptr().cast::<u32>().write(size_of::<T>() as u32);
        out.assume_init()
    }
}

/// Returns `count` zeros, or `Error::NoMemory`.
pub(crate) fn zeros<T: Copy + Default>(count: usize) -> Result<Vec<T>> {
    let mut out = Vec::new();
    out.try_reserve_exact(count).map_err(|error| {
        let message = format!("no memory for {count} numbers of {} bytes", size_of::<T>());
        Error::found(sys::KV_NO_MEMORY, message, Some(error.into()))
    })?;
    out.resize(count, T::default());
    Ok(out)
}

/// Converts an index.
pub(crate) fn index(index: usize) -> Result<u32> {
    u32::try_from(index).map_err(|error| {
        Error::found(sys::KV_BAD_ARGUMENT, format!("{index} is too large"), Some(error.into()))
    })
}

/// Makes a call that fills an array up to its capacity and reports the full size. `first` is the
/// capacity of the first try.
pub(crate) fn fill<T: Copy + Default>(
    first: usize,
    f: impl Fn(*mut T, usize, *mut usize, *mut sys::kv_error) -> sys::kv_status,
) -> Result<Vec<T>> {
    let mut capacity = first;
    loop {
        let (mut out, mut size) = (zeros(capacity)?, 0);
        match call(|error| f(out.as_mut_ptr(), capacity, &mut size, error)) {
            Err(Error::Limit(_)) if size > capacity => capacity = size,
            Err(error) => return Err(error),
            Ok(()) => {
                out.truncate(size);
                return Ok(out);
            }
        }
    }
}

/// Makes such a call whose output is JSON with a final NUL.
pub(crate) fn json(
    f: impl Fn(*mut c_char, usize, *mut usize, *mut sys::kv_error) -> sys::kv_status,
) -> Result<String> {
    let mut bytes =
        fill::<u8>(8192, |out, capacity, size, error| f(out.cast(), capacity, size, error))?;
    bytes.pop();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub(crate) fn string(text: &str, name: &str) -> Result<CString> {
    terminated(text.as_bytes(), name)
}

#[cfg(unix)]
pub(crate) fn path(path: &Path) -> Result<CString> {
    use std::os::unix::ffi::OsStrExt;
    terminated(path.as_os_str().as_bytes(), "the path")
}

#[cfg(not(unix))]
pub(crate) fn path(path: &Path) -> Result<CString> {
    match path.to_str() {
        Some(text) => terminated(text.as_bytes(), "the path"),
        None => Err(Error::bad_argument(format!("the path {} is not Unicode", path.display()))),
    }
}

fn terminated(bytes: &[u8], name: &str) -> Result<CString> {
    CString::new(bytes).map_err(|nul| {
        let text = String::from_utf8_lossy(bytes);
        let message = format!("{name} has a NUL byte at {}: {text:?}", nul.nul_position());
        Error::found(sys::KV_BAD_ARGUMENT, message, Some(nul.into()))
    })
}

/// The terminated text in an array of a struct.
pub(crate) fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
