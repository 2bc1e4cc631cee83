//! Pure: locking of mutexes whose poison is of no consequence.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, and ignores the poison of a panic: no lock of this crate guards a half-done change.
pub(crate) fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}
