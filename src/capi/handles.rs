//! The table that maps handles to objects.
//!
//! A handle is a number that C sees as a pointer to an opaque struct. The library looks the number up and never
//! dereferences it. No number is used twice, so the library detects a freed or foreign handle. Begin at [`add`].

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use super::status::{CallError, MusterStatus};

/// An opaque struct of the interface.
pub trait OpaqueHandle {
    /// The object for which its handles stand.
    type Object: Any + Send + Sync;
    /// Its name in the interface.
    const NAME: &'static str;
}

type ObjectsByHandle = HashMap<usize, Arc<dyn Any + Send + Sync>>;

static TABLE: LazyLock<RwLock<ObjectsByHandle>> = LazyLock::new(RwLock::default);
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Adds an object and returns its handle.
pub fn add<H: OpaqueHandle>(object: Arc<H::Object>) -> *mut H {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    TABLE.write().unwrap_or_else(PoisonError::into_inner).insert(number, object);
    std::ptr::without_provenance_mut(number)
}

/// Returns the object of a handle.
pub fn get<H: OpaqueHandle>(handle: *const H) -> Result<Arc<H::Object>, CallError> {
    let found = TABLE.read().unwrap_or_else(PoisonError::into_inner).get(&handle.addr()).cloned();
    found.and_then(|object| object.downcast().ok()).ok_or_else(|| invalid_handle_error(handle))
}

/// Returns the object of a handle, if there is one: NULL stands for none.
pub fn get_optional<H: OpaqueHandle>(handle: *const H) -> Result<Option<Arc<H::Object>>, CallError> {
    if handle.is_null() { Ok(None) } else { get(handle).map(Some) }
}

/// Removes a handle and returns its object; `None` for NULL.
pub fn remove<H: OpaqueHandle>(handle: *mut H) -> Result<Option<Arc<H::Object>>, CallError> {
    if handle.is_null() {
        return Ok(None);
    }
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    // An object of another kind stays.
    if !table.get(&handle.addr()).is_some_and(|object| (**object).is::<H::Object>()) {
        return Err(invalid_handle_error(handle));
    }
    let object = table.remove(&handle.addr());
    // The object may be dropped by the caller, which takes other locks.
    drop(table);
    Ok(object.and_then(|object| object.downcast().ok()))
}

/// Returns the number of handles that are not freed.
pub fn count() -> usize {
    TABLE.read().unwrap_or_else(PoisonError::into_inner).len()
}

fn invalid_handle_error<H: OpaqueHandle>(handle: *const H) -> CallError {
    let what = if handle.is_null() { "it is NULL" } else { "it was freed, or is another kind of handle" };
    CallError::new(MusterStatus::InvalidHandle, format!("this is no handle of type {}: {what}", H::NAME))
}
