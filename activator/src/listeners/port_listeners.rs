//! Shell: listeners of single ports, which open and close as the RouteTable changes.
//!
//! A listener belongs to its task, which closes it a moment after the order. A second socket could not be bound to the
//! port before that. So a port that is wanted again meanwhile keeps the listener that it has.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{net::TcpListener, sync::Notify};

use crate::tcp_socket;

/// Listeners of ports, by address.
#[derive(Debug, Default)]
pub struct PortListenerSet {
    open: BTreeMap<SocketAddr, Arc<ListenerHandle>>,
    /// Listeners that were ordered to close, and may not have closed yet.
    closing: BTreeMap<SocketAddr, Arc<ListenerHandle>>,
    failed: BTreeSet<SocketAddr>,
}

/// Changes of a set of listeners, for the log.
#[derive(Debug, Default)]
pub struct ListenerChanges {
    /// Addresses that new connections do not reach any more.
    pub closed: Vec<SocketAddr>,
    /// Addresses that are open now.
    pub opened: Vec<SocketAddr>,
    /// Addresses that cannot be opened, with the reason. One that has failed before is not listed again.
    pub failed: Vec<(SocketAddr, io::Error)>,
}

impl PortListenerSet {
    /// Opens and closes listeners until exactly these addresses are open. Open ones are left alone, so that a change of
    /// other ports disturbs none of their clients. An address that cannot be opened is tried again by the next call.
    ///
    /// `start` gets each new listener, and starts the task that accepts its connections. The task closes the listener as
    /// its handle orders.
    pub fn set(
        &mut self,
        want: &BTreeSet<SocketAddr>,
        mut start: impl FnMut(TcpListener, SocketAddr, Arc<ListenerHandle>),
    ) -> ListenerChanges {
        let mut changes = ListenerChanges::default();
        self.closing.retain(|_, handle| !handle.is_closed());
        let unwanted = self.open.keys().filter(|address| !want.contains(*address));
        changes.closed = unwanted.copied().collect();
        for address in &changes.closed {
            if let Some(handle) = self.open.remove(address) {
                handle.order_close();
                self.closing.insert(*address, handle);
            }
        }
        // An address that is not wanted any more is no failure, and must leave the metric.
        self.failed.retain(|address| want.contains(address));
        for &address in want {
            if self.open.contains_key(&address) {
                continue;
            }
            match self.open_address(address, &mut start) {
                Ok(()) => {
                    self.failed.remove(&address);
                    changes.opened.push(address);
                }
                // A failure is reported when it begins, and not at each call.
                Err(error) if self.failed.insert(address) => changes.failed.push((address, error)),
                Err(_) => {}
            }
        }
        changes
    }

    /// Returns the number of open addresses.
    pub fn open_count(&self) -> usize {
        self.open.len()
    }

    /// Returns the addresses that are wanted and cannot be opened.
    pub fn failed(&self) -> &BTreeSet<SocketAddr> {
        &self.failed
    }

    fn open_address(
        &mut self,
        address: SocketAddr,
        start: &mut impl FnMut(TcpListener, SocketAddr, Arc<ListenerHandle>),
    ) -> io::Result<()> {
        // A listener that still drains its queue has the address: it is kept, because a second one cannot be bound.
        let still_open = self.closing.remove(&address).filter(|handle| handle.withdraw_close());
        let handle = match still_open {
            Some(handle) => handle,
            None => {
                let listener = tcp_socket::bind_listener(address)?;
                let handle = Arc::new(ListenerHandle::default());
                start(listener, address, Arc::clone(&handle));
                handle
            }
        };
        self.open.insert(address, handle);
        Ok(())
    }
}

/// Orders to the task of a listener: to close it, and to keep it after all if it has not closed yet.
#[derive(Debug, Default)]
pub struct ListenerHandle {
    state: Mutex<ListenerState>,
    /// Wakes the task after an order to close.
    ordered: Notify,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ListenerState {
    #[default]
    Open,
    /// The task has the order to close, and has not begun.
    CloseOrdered,
    /// The listener is closed, or closes while the state is locked.
    Closed,
}

/// Lock on the state of a listener while its task closes it.
#[derive(Debug)]
pub struct ListenerCloseGuard<'a> {
    _state: MutexGuard<'a, ListenerState>,
}

impl ListenerHandle {
    /// Waits for an order to close. It may be withdrawn until [`begin_close`](Self::begin_close) is called.
    pub async fn wait_close_ordered(&self) {
        let is_ordered = || *self.lock() == ListenerState::CloseOrdered;
        while !is_ordered() {
            // An order that came since the look has left its notification.
            self.ordered.notified().await;
        }
    }

    /// Begins the close, if it is still ordered. Drop the listener before the guard: until then, no other listener is
    /// opened on the port.
    pub fn begin_close(&self) -> Option<ListenerCloseGuard<'_>> {
        let mut state = self.lock();
        if *state != ListenerState::CloseOrdered {
            return None;
        }
        *state = ListenerState::Closed;
        Some(ListenerCloseGuard { _state: state })
    }

    fn order_close(&self) {
        *self.lock() = ListenerState::CloseOrdered;
        self.ordered.notify_one();
    }

    /// Withdraws an order to close. Returns false if the listener has closed.
    fn withdraw_close(&self) -> bool {
        let mut state = self.lock();
        if *state == ListenerState::CloseOrdered {
            *state = ListenerState::Open;
        }
        *state == ListenerState::Open
    }

    fn is_closed(&self) -> bool {
        *self.lock() == ListenerState::Closed
    }

    fn lock(&self) -> MutexGuard<'_, ListenerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use common::fixtures::ports::unused_port;

    use super::*;

    /// Listeners that were started, whose tasks the test plays.
    type Started = Vec<(TcpListener, Arc<ListenerHandle>)>;

    fn unused_address() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, unused_port()).into()
    }

    fn set(
        listeners: &mut PortListenerSet,
        started: &mut Started,
        want: &[SocketAddr],
    ) -> ListenerChanges {
        let want = want.iter().copied().collect();
        listeners.set(&want, |listener, _, handle| started.push((listener, handle)))
    }

    #[tokio::test]
    async fn a_port_that_is_wanted_again_before_it_has_closed_keeps_its_listener() {
        let (mut listeners, mut started) = (PortListenerSet::default(), Started::new());
        let address = unused_address();
        assert_eq!(set(&mut listeners, &mut started, &[address]).opened, [address]);
        for _ in 0..3 {
            assert_eq!(set(&mut listeners, &mut started, &[]).closed, [address]);
            assert_eq!(listeners.open_count(), 0);
            let changes = set(&mut listeners, &mut started, &[address]);
            assert_eq!(changes.opened, [address]);
            assert!(changes.failed.is_empty(), "{changes:?}");
        }
        assert_eq!(started.len(), 1);
        // The task finds out that it is to go on, whenever it looks.
        assert!(started[0].1.begin_close().is_none());
    }

    #[tokio::test]
    async fn a_port_whose_listener_has_closed_gets_another_one() {
        let (mut listeners, mut started) = (PortListenerSet::default(), Started::new());
        let address = unused_address();
        set(&mut listeners, &mut started, &[address]);
        set(&mut listeners, &mut started, &[]);
        let (listener, handle) = started.pop().expect("one was started");
        handle.wait_close_ordered().await;
        let closing = handle.begin_close().expect("it is ordered");
        drop(listener);
        drop(closing);
        let changes = set(&mut listeners, &mut started, &[address]);
        assert_eq!((changes.opened, started.len()), (vec![address], 1));
    }

    /// The thread waits for the close, or comes after it.
    #[tokio::test]
    async fn a_port_is_opened_again_only_after_a_close_that_has_begun() {
        let (mut listeners, mut started) = (PortListenerSet::default(), Started::new());
        let address = unused_address();
        set(&mut listeners, &mut started, &[address]);
        set(&mut listeners, &mut started, &[]);
        let (listener, handle) = started.pop().expect("one was started");
        let closing = handle.begin_close().expect("it is ordered");
        let runtime = tokio::runtime::Handle::current();
        let changes = std::thread::scope(|scope| {
            let opened = scope.spawn(|| {
                let _for_the_socket = runtime.enter();
                set(&mut listeners, &mut started, &[address])
            });
            drop(listener);
            drop(closing);
            opened.join().expect("no panic")
        });
        assert_eq!(changes.opened, [address], "{changes:?}");
    }

    #[tokio::test]
    async fn a_port_that_is_taken_fails_once_and_is_tried_again() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = taken.local_addr().expect("bound");
        let (mut listeners, mut started) = (PortListenerSet::default(), Started::new());
        let failed = set(&mut listeners, &mut started, &[address]).failed;
        assert_eq!(failed.iter().map(|(address, _)| *address).collect::<Vec<_>>(), [address]);
        assert!(set(&mut listeners, &mut started, &[address]).failed.is_empty(), "as before");
        assert_eq!(*listeners.failed(), [address].into());
        drop(taken);
        assert_eq!(set(&mut listeners, &mut started, &[address]).opened, [address]);
        assert!(listeners.failed().is_empty());
    }

    #[tokio::test]
    async fn a_failed_port_that_is_not_wanted_any_more_is_no_failure() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = taken.local_addr().expect("bound");
        let (mut listeners, mut started) = (PortListenerSet::default(), Started::new());
        set(&mut listeners, &mut started, &[address]);
        let changes = set(&mut listeners, &mut started, &[]);
        assert!(changes.closed.is_empty() && listeners.failed().is_empty(), "{changes:?}");
    }
}
