//! Shell: creates network namespaces with `unshare(2)`, and writes their first settings below `/proc/sys/net`.
//!
//! Namespaces of clients and pods get connection tables of their own. By default all namespaces of a machine share one
//! table. A list of the connections in one namespace then walks all of it: 4.5 ms with 262,144 buckets, instead of
//! 0.15 ms with 16,384. The agent makes such lists all the time while pods drain.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::sched::{CloneFlags, unshare};
use tracing::warn;

use super::{NetError, current_namespace, enter_namespace, namespace_error};

/// Setting of a namespace: buckets in the table of each namespace that is created from it afterwards, or 0 for the
/// machine's table. Since Linux 6.1.
const CHILD_TABLE_ENTRIES: &str = "/proc/sys/net/ipv4/tcp_child_ehash_entries";
/// Setting of the same kind for UDP sockets, since Linux 6.2, which stays as the machine has it.
const CHILD_UDP_TABLE_ENTRIES: &str = "/proc/sys/net/ipv4/udp_child_hash_entries";
/// Number of buckets in the connection table of a client's or pod's namespace, at 8 bytes each.
const TABLE_ENTRIES: u32 = 16_384;
/// Limits of sockets in TIME_WAIT and of half-open connections. The kernel derives them from the size of the table of a
/// new namespace.
const DERIVED_LIMITS: [&str; 2] =
    ["/proc/sys/net/ipv4/tcp_max_tw_buckets", "/proc/sys/net/ipv4/tcp_max_syn_backlog"];

/// Creates a network namespace; the calling thread stays in `own_namespace`.
pub(super) fn create_namespace(own_namespace: BorrowedFd<'_>) -> Result<OwnedFd, NetError> {
    let limits = TableLimits::read();
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(io::Error::from)
        .map_err(namespace_error("make", ""))?;
    // As containerd does it: a process without privileges may serve on port 80. If `unshare` failed, this would set it
    // for the machine or the node.
    let _ = fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    limits.write();
    let namespace = current_namespace();
    // Also after an error: this thread must not stay in a namespace of its own.
    enter_namespace(own_namespace)?;
    namespace
}

/// Gives connection tables of their own to the namespaces that are created from `parent` afterwards. The calling thread
/// stays in `own_namespace`.
pub(super) fn enable_own_tables(
    parent: BorrowedFd<'_>,
    own_namespace: BorrowedFd<'_>,
) -> Result<(), NetError> {
    // If the thread stayed outside, this would change all namespaces that other programs of the machine create.
    enter_namespace(parent)?;
    // Kernels before 6.1 do not have the setting. Their namespaces share the machine's table, which is only slower.
    let _ = fs::write(CHILD_TABLE_ENTRIES, TABLE_ENTRIES.to_string());
    enter_namespace(own_namespace)
}

/// Creates the clients' namespace, with a connection table of its own; the calling thread stays in `own_namespace`.
///
/// A namespace between the two is there for the setting alone, and passes on what `own_namespace` would. The node's
/// namespace would pass on that it forwards packets, where `net.core.devconf_inherit_init_net` is 3.
pub(super) fn create_client_namespace(own_namespace: BorrowedFd<'_>) -> Result<OwnedFd, NetError> {
    let udp_entries = fs::read(CHILD_UDP_TABLE_ENTRIES);
    let parent = create_namespace(own_namespace)?;
    enable_own_tables(parent.as_fd(), own_namespace)?;
    enter_namespace(parent.as_fd())?;
    if let Ok(entries) = udp_entries {
        // The value is one that the kernel has accepted.
        let _ = fs::write(CHILD_UDP_TABLE_ENTRIES, entries);
    }
    let namespace = create_namespace(parent.as_fd());
    enter_namespace(own_namespace)?;
    namespace
}

/// Limits of the calling thread's namespace that one with a smaller connection table must get back: path and value.
#[derive(Debug)]
struct TableLimits(Vec<(&'static str, String)>);

impl TableLimits {
    /// Reads the limits; none if new namespaces share the machine's table, since their limits are then as usual.
    fn read() -> Self {
        let entries = fs::read_to_string(CHILD_TABLE_ENTRIES).unwrap_or_default();
        if matches!(entries.trim(), "" | "0") {
            return Self(Vec::new());
        }
        let limit = |path: &'static str| Some((path, fs::read_to_string(path).ok()?));
        Self(DERIVED_LIMITS.into_iter().filter_map(limit).collect())
    }

    /// Writes the limits to the calling thread's namespace.
    fn write(&self) {
        for (path, value) in &self.0 {
            if let Err(error) = fs::write(path, value) {
                warn!(path = *path, %error, "limit of a network namespace not restored");
            }
        }
    }
}
