//! Pure: the connections to one pod, and their assignment to requests.
//!
//! A request that finds no usable connection waits for the next one, new or given back. The number of dials is bounded,
//! because a pod's accept queue holds its listen backlog and drops SYNs beyond it. Before the pod's first response, a
//! dial counts as under way until that response, or until a moment after it is connected. Afterwards it counts only
//! until it is connected.
//!
//! While connections come back to requests that wait, fewer are dialled: one that comes back costs nothing. The bound
//! on dials falls by one with each, down to a sixteenth. It doubles again with each dial in whose time none has come
//! back. So slow requests still get a connection each.
//!
//! A connection that carries several requests at once stays in the pool while requests use it. It serves all waiting
//! requests for as long as it can carry more. One for raw TCP is never kept: it serves one client.
//!
//! `C` is a connection or one use of it. `W` is the waiter that gets one. The pool only keeps and returns them.

use std::collections::VecDeque;

/// Part of the maximum of dials that is always allowed.
const MIN_DIALS_DIVISOR: u32 = 16;

/// Use of a pooled connection for one more request.
#[derive(Debug)]
pub enum PoolReservation<C> {
    /// The connection serves this request alone.
    Exclusive,
    /// The connection is shared; this is one more use of it.
    Shared(C),
    /// The connection is used by as many requests as it can carry.
    Busy,
    /// The connection cannot be used any more.
    Unusable,
}

/// Connection that a pool can lend to requests.
pub trait PoolableConnection: Sized {
    /// Use of the connection that a request can get now.
    fn reserve(&self) -> PoolReservation<Self>;
}

/// Connections of one pod, and the requests that wait for them.
#[derive(Debug)]
pub struct PodConnectionPool<C, W> {
    /// Idle connections, and shared connections in use.
    pooled: Vec<C>,
    waiters: VecDeque<W>,
    /// Dials that are not connected yet.
    dials_in_progress: u32,
    /// Connections that were opened a moment ago, before the pod's first response. They still count as dials.
    recently_connected: u32,
    /// Maximum number of dials under way.
    max_dials: u32,
    /// Bound on them for the requests that wait now. It is lower while connections come back to them.
    dial_bound: u32,
    /// Dials in progress that began before a connection last came back to a waiter.
    dials_before_return: u32,
    /// True once the pod has sent a response.
    has_responded: bool,
    /// True while the pod is ready or early-ready, also while it is paused. Otherwise no connection is kept idle.
    is_ready: bool,
    /// True while the pod has a standby order. No connection is kept idle then.
    is_standby: bool,
    /// False if a connection that no request wants is dropped.
    keeps_idle: bool,
}

/// Next actions for the shell.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct PoolAction<C, W> {
    /// Connection to hand to this waiter; if the waiter is gone, the connection is to be given back.
    pub handoff: Option<(W, C)>,
    /// Number of dials to start.
    pub dials: u32,
}

impl<C: PoolableConnection, W> PodConnectionPool<C, W> {
    /// Creates the pool of a pod with this listen backlog, without connections.
    pub fn new(backlog: u32) -> Self {
        Self::with_max_dials((backlog / 2).max(1))
    }

    /// Creates the pool of a pod whose connections carry several requests: one is dialled at a time.
    pub fn for_shared() -> Self {
        Self::with_max_dials(1)
    }

    /// Creates the pool of a pod with this listen backlog whose connections serve one client each. One that comes when
    /// its client is gone serves the next that waits, and otherwise none.
    pub fn for_single_use(backlog: u32) -> Self {
        Self { keeps_idle: false, ..Self::new(backlog) }
    }

    fn with_max_dials(max_dials: u32) -> Self {
        Self {
            pooled: Vec::new(),
            waiters: VecDeque::new(),
            dials_in_progress: 0,
            recently_connected: 0,
            max_dials,
            dial_bound: max_dials,
            dials_before_return: 0,
            has_responded: false,
            is_ready: true,
            is_standby: false,
            keeps_idle: true,
        }
    }

    /// Connection for one request: the newest one that is usable. Stale ones found on the way are dropped.
    pub fn take_usable(&mut self) -> Option<C> {
        for at in (0..self.pooled.len()).rev() {
            match self.pooled[at].reserve() {
                PoolReservation::Exclusive => return Some(self.pooled.remove(at)),
                PoolReservation::Shared(connection) => return Some(connection),
                PoolReservation::Busy => {}
                PoolReservation::Unusable => drop(self.pooled.remove(at)),
            }
        }
        None
    }

    /// Queues a request that found no usable connection. Returns the number of dials to start.
    #[must_use]
    pub fn add_waiter(&mut self, waiter: W) -> u32 {
        if self.waiters.is_empty() {
            (self.dial_bound, self.dials_before_return) = (self.max_dials, 0);
        }
        self.waiters.push_back(waiter);
        self.allocate_dials()
    }

    /// Queues a request again that [`on_late_dial`](Self::on_late_dial) returned: in front, since it has waited for
    /// longest. Returns the number of dials to start.
    #[must_use]
    pub fn requeue_waiter(&mut self, waiter: W) -> u32 {
        self.waiters.push_front(waiter);
        self.allocate_dials()
    }

    /// Registers the connection of a dial. Returns the next actions.
    pub fn on_connected(&mut self, connection: C) -> PoolAction<C, W> {
        self.dials_in_progress = self.dials_in_progress.saturating_sub(1);
        self.recently_connected += u32::from(!self.has_responded);
        match self.dials_before_return {
            0 => self.dial_bound = self.dial_bound.saturating_mul(2).min(self.max_dials),
            before => self.dials_before_return = before - 1,
        }
        self.assign(connection)
    }

    /// Registers that a moment has passed since [`on_connected`](Self::on_connected), before the first response.
    /// Returns the number of dials to start.
    #[must_use]
    pub fn on_grace_elapsed(&mut self) -> u32 {
        self.recently_connected = self.recently_connected.saturating_sub(1);
        self.allocate_dials()
    }

    /// Registers that the pod has sent a response. Returns the number of dials to start.
    #[must_use]
    pub fn on_first_response(&mut self) -> u32 {
        self.has_responded = true;
        self.recently_connected = 0;
        self.allocate_dials()
    }

    /// Returns true if the pod has sent a response. Until then [`on_grace_elapsed`](Self::on_grace_elapsed) must follow
    /// each [`on_connected`](Self::on_connected).
    pub fn has_responded(&self) -> bool {
        self.has_responded
    }

    /// Registers a failed dial. Returns all waiters, which try another pod.
    pub fn on_dial_failed(&mut self) -> VecDeque<W> {
        self.dials_in_progress = self.dials_in_progress.saturating_sub(1);
        std::mem::take(&mut self.waiters)
    }

    /// Registers a dial that is late. Returns the first waiter, which tries another pod if there is one, and otherwise
    /// comes back by [`requeue_waiter`](Self::requeue_waiter).
    #[must_use]
    pub fn on_late_dial(&mut self) -> Option<W> {
        self.waiters.pop_front()
    }

    /// Returns all waiters, because another pod is better for now.
    pub fn take_waiters(&mut self) -> VecDeque<W> {
        std::mem::take(&mut self.waiters)
    }

    /// Registers a connection that is free for the next request. Returns the next actions.
    pub fn on_idle_connection(&mut self, connection: C) -> PoolAction<C, W> {
        // Before the first response only connections come back whose requests are gone.
        if self.has_responded && !self.waiters.is_empty() {
            let fewest = (self.max_dials / MIN_DIALS_DIVISOR).max(1);
            self.dial_bound = self.dial_bound.saturating_sub(1).max(fewest);
            self.dials_before_return = self.dials_in_progress;
        }
        self.assign(connection)
    }

    /// Gives a free connection to the first waiter, or keeps it. Returns the next actions.
    fn assign(&mut self, connection: C) -> PoolAction<C, W> {
        let handoff = match self.waiters.pop_front() {
            Some(waiter) => Some((waiter, self.reserve_for_waiter(connection))),
            None => {
                self.keep_pooled(connection);
                None
            }
        };
        PoolAction { handoff, dials: self.allocate_dials() }
    }

    /// Registers that a waiter was served. Returns the next waiter, if a shared connection can carry it.
    pub fn on_waiter_served(&mut self) -> PoolAction<C, W> {
        // A shared connection goes on from waiter to waiter, since only one is dialled at a time.
        let free = if self.waiters.is_empty() { None } else { self.take_usable() };
        let handoff = free.and_then(|connection| Some((self.waiters.pop_front()?, connection)));
        if !self.keeps_pooled() && self.waiters.is_empty() {
            self.pooled.clear();
        }
        PoolAction { handoff, dials: self.allocate_dials() }
    }

    /// Use of a new or free connection for one request.
    fn reserve_for_waiter(&mut self, connection: C) -> C {
        match connection.reserve() {
            PoolReservation::Shared(reserved) => {
                self.pooled.push(connection);
                reserved
            }
            // A connection for one request is handed out whole, also an unusable one: its use fails, and the request
            // tries again.
            PoolReservation::Exclusive | PoolReservation::Busy | PoolReservation::Unusable => {
                connection
            }
        }
    }

    fn keep_pooled(&mut self, connection: C) {
        if self.keeps_pooled() {
            self.pooled.push(connection);
        }
    }

    fn keeps_pooled(&self) -> bool {
        self.is_ready && !self.is_standby && self.keeps_idle
    }

    /// Drops pooled connections for which `keep` returns false.
    pub fn prune_idle(&mut self, keep: impl FnMut(&C) -> bool) {
        self.pooled.retain(keep);
    }

    /// Registers that the pod is ready.
    pub fn on_ready(&mut self) {
        self.is_ready = true;
    }

    /// Registers that the pod is not ready, so that no connection is kept idle. Returns all waiters, which try another
    /// pod.
    pub fn on_not_ready(&mut self) -> VecDeque<W> {
        self.is_ready = false;
        self.pooled.clear();
        std::mem::take(&mut self.waiters)
    }

    /// Registers if the pod has a standby order, so that no connection is kept idle. Requests that wait for a
    /// connection stay, since they have a dial under way.
    pub fn set_standby(&mut self, has_order: bool) {
        self.is_standby = has_order;
        if has_order {
            self.pooled.clear();
        }
    }

    /// Number of pooled connections: idle ones, and shared ones in use.
    pub fn pooled_count(&self) -> usize {
        self.pooled.len()
    }

    /// Number of dials under way.
    fn dials_under_way(&self) -> u32 {
        self.dials_in_progress + self.recently_connected
    }

    fn allocate_dials(&mut self) -> u32 {
        // No more dials than waiters, and no more under way than the pod's accept queue holds.
        let waiting = u32::try_from(self.waiters.len()).unwrap_or(u32::MAX);
        let more = waiting.min(self.dial_bound).saturating_sub(self.dials_under_way());
        self.dials_in_progress += more;
        more
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use proptest::prelude::*;

    use super::*;

    impl PoolableConnection for u32 {
        fn reserve(&self) -> PoolReservation<Self> {
            PoolReservation::Exclusive
        }
    }

    /// Connection for two requests at once. Each use is a connection that carries no other request.
    #[derive(Debug, Clone)]
    struct FakeSharedConnection {
        uses: Rc<Cell<u32>>,
        /// False for the connection itself, as it is kept in the pool.
        is_use: bool,
    }

    impl FakeSharedConnection {
        fn new(uses: &Rc<Cell<u32>>) -> Self {
            Self { uses: Rc::clone(uses), is_use: false }
        }
    }

    impl PoolableConnection for FakeSharedConnection {
        fn reserve(&self) -> PoolReservation<Self> {
            match self.uses.get() {
                2.. => PoolReservation::Busy,
                uses => {
                    self.uses.set(uses + 1);
                    PoolReservation::Shared(Self { uses: Rc::clone(&self.uses), is_use: true })
                }
            }
        }
    }

    #[test]
    fn a_shared_connection_serves_all_it_has_room_for() {
        let mut pool = PodConnectionPool::<FakeSharedConnection, u32>::for_shared();
        assert_eq!((0..5).map(|name| pool.add_waiter(name)).sum::<u32>(), 1);
        let uses = Rc::new(Cell::new(0));
        let mut handed = Vec::new();
        let mut next = pool.on_connected(FakeSharedConnection::new(&uses));
        while let Some((waiter, connection)) = next.handoff {
            assert!(connection.is_use, "a use, not the connection");
            handed.push(waiter);
            next = pool.on_waiter_served();
        }
        assert_eq!((handed, pool.pooled_count(), pool.on_first_response()), (vec![0, 1], 1, 1));
        uses.set(1);
        assert_eq!(pool.on_waiter_served().handoff.map(|(waiter, _)| waiter), Some(2));
        assert!(pool.take_usable().is_none(), "as much in use as it can be");
    }

    #[test]
    fn half_the_backlog_is_dialled_until_the_first_response() {
        let mut pool = PodConnectionPool::<u32, u32>::new(8);
        let dials: u32 = (0..10).map(|name| pool.add_waiter(name)).sum();
        assert_eq!(dials, 4);
        assert_eq!(pool.on_connected(70), PoolAction { handoff: Some((0, 70)), dials: 0 });
        assert_eq!(pool.on_first_response(), 1);
        assert_eq!(pool.on_connected(71), PoolAction { handoff: Some((1, 71)), dials: 1 });
    }

    #[test]
    fn an_app_that_is_slow_to_respond_still_gets_all_its_requests() {
        let mut pool = PodConnectionPool::<u32, u32>::new(8);
        let dials: u32 = (0..10).map(|name| pool.add_waiter(name)).sum();
        assert_eq!(dials, 4);
        let handed = (0..4).filter(|&at| pool.on_connected(at).handoff.is_some()).count();
        assert_eq!((handed, pool.has_responded()), (4, false));
        assert_eq!((0..4).map(|_| pool.on_grace_elapsed()).sum::<u32>(), 4);
    }

    #[test]
    fn a_returned_connection_goes_to_a_waiter() {
        let mut pool = PodConnectionPool::<u32, _>::new(128);
        assert_eq!(pool.add_waiter("a"), 1);
        assert_eq!(pool.on_idle_connection(7), PoolAction { handoff: Some(("a", 7)), dials: 0 });
        assert_eq!(pool.on_connected(8), PoolAction { handoff: None, dials: 0 });
        assert_eq!(pool.take_usable(), Some(8));
        assert_eq!(pool.take_usable(), None);
    }

    /// Serves `count` requests that wait at once, at a pod that has responded before. In each round all dials under way
    /// are connected. If the requests are fast, those of the last round have ended. Returns the number of dials.
    fn dials_for(count: u32, is_fast: bool) -> u32 {
        let mut pool = PodConnectionPool::<u32, u32>::new(128);
        assert_eq!(pool.on_first_response(), 0);
        let mut dials: u32 = (0..count).map(|name| pool.add_waiter(name)).sum();
        let (mut under_way, mut served, mut in_use) = (dials, 0, 0);
        while served < count {
            assert!(under_way > 0, "a dial is under way while a request waits");
            let returns = if is_fast { in_use } else { 0 };
            let events = returns + under_way;
            (under_way, in_use) = (0, 0);
            for event in 0..events {
                let next = match event < returns {
                    true => pool.on_idle_connection(0),
                    false => pool.on_connected(0),
                };
                in_use += u32::from(next.handoff.is_some());
                under_way += next.dials;
            }
            served += in_use;
            dials += under_way;
        }
        dials
    }

    #[test]
    fn requests_that_end_quickly_pass_their_connections_on_and_few_are_dialled() {
        assert_eq!(dials_for(10_000, false), 10_000, "slow requests: each needs a connection");
        let fast = dials_for(10_000, true);
        // With a constant bound on dials, they would be more than 1,000.
        assert!((64..600).contains(&fast), "{fast} dials");
        assert_eq!(dials_for(64, true), 64, "a short queue is dialled at once");
    }

    #[test]
    fn as_much_is_dialled_as_before_once_no_connection_comes_back_any_more() {
        let mut pool = PodConnectionPool::<u32, u32>::new(128);
        assert_eq!(pool.on_first_response(), 0);
        assert_eq!((0..1_000).map(|name| pool.add_waiter(name)).sum::<u32>(), 64);
        assert_eq!((0..100).map(|_| pool.on_idle_connection(0).dials).sum::<u32>(), 0);
        let mut connect_all =
            |dials: u32| -> u32 { (0..dials).map(|_| pool.on_connected(0).dials).sum() };
        // The dials that were under way while connections came back show nothing.
        let few = connect_all(64);
        assert_eq!((few, connect_all(few)), (4, 64));
    }

    #[test]
    fn a_connection_for_single_use_goes_to_a_waiter_or_to_none() {
        let mut pool = PodConnectionPool::<u32, _>::for_single_use(4);
        assert_eq!(pool.add_waiter("gone") + pool.add_waiter("next") + pool.add_waiter("last"), 2);
        assert_eq!(pool.on_connected(7).handoff, Some(("gone", 7)));
        assert_eq!(pool.on_idle_connection(7).handoff, Some(("next", 7)));
        assert_eq!(pool.on_connected(8).handoff, Some(("last", 8)));
        assert_eq!(pool.on_idle_connection(8).handoff, None);
        assert_eq!((pool.pooled_count(), pool.take_usable()), (0, None));
    }

    #[test]
    fn a_failed_dial_returns_all_waiters() {
        let mut pool = PodConnectionPool::<u32, _>::new(2);
        assert_eq!(pool.add_waiter("a") + pool.add_waiter("b"), 1);
        assert_eq!(pool.on_dial_failed(), ["a", "b"]);
        assert_eq!(pool.add_waiter("c"), 1);
    }

    #[test]
    fn a_waiter_of_a_late_dial_keeps_its_place() {
        let mut pool = PodConnectionPool::<u32, _>::new(2);
        assert_eq!(pool.add_waiter("a") + pool.add_waiter("b"), 1);
        for _ in 0..2 {
            let first = pool.on_late_dial().expect("two wait");
            assert_eq!((first, pool.requeue_waiter(first)), ("a", 0));
        }
        assert_eq!(pool.on_connected(1).handoff, Some(("a", 1)));
    }

    #[test]
    fn the_pool_of_a_pod_that_is_not_ready_keeps_nothing_idle() {
        let mut pool = PodConnectionPool::<u32, _>::new(2);
        assert_eq!(pool.on_idle_connection(1).handoff, None);
        assert_eq!(pool.add_waiter("a"), 1);
        assert_eq!(pool.on_not_ready(), ["a"]);
        assert_eq!(pool.on_connected(2).handoff, None);
        assert_eq!(pool.pooled_count(), 0);
    }

    #[test]
    fn the_pool_of_a_pod_with_a_standby_order_keeps_nothing_idle() {
        let mut pool = PodConnectionPool::<u32, _>::new(2);
        assert_eq!(pool.on_idle_connection(1).handoff, None);
        pool.set_standby(true);
        assert_eq!((pool.pooled_count(), pool.take_usable()), (0, None));
        assert_eq!(pool.add_waiter("a"), 1);
        pool.set_standby(true);
        assert_eq!(pool.on_connected(2).handoff, Some(("a", 2)), "it still gets its connection");
        assert_eq!(pool.on_idle_connection(2).handoff, None);
        assert_eq!(pool.pooled_count(), 0);
        pool.set_standby(false);
        assert_eq!(pool.on_idle_connection(3).handoff, None);
        assert_eq!(pool.take_usable(), Some(3));
    }

    #[test]
    fn a_shared_connection_to_a_pod_with_a_standby_order_serves_all_that_wait_and_no_later_one() {
        let mut pool = PodConnectionPool::<FakeSharedConnection, u32>::for_shared();
        pool.set_standby(true);
        assert_eq!((0..2).map(|name| pool.add_waiter(name)).sum::<u32>(), 1);
        let uses = Rc::new(Cell::new(0));
        let mut handed = Vec::new();
        let mut next = pool.on_connected(FakeSharedConnection::new(&uses));
        while let Some((waiter, _)) = next.handoff {
            handed.push(waiter);
            next = pool.on_waiter_served();
        }
        assert_eq!((handed, pool.pooled_count()), (vec![0, 1], 0));
    }

    proptest! {
        /// Whatever happens, dials under way stay bounded, and every waiter has a connection on its way.
        #[test]
        fn no_waiter_is_forgotten(ops in proptest::collection::vec(0..7u8, 0..200)) {
            let mut pool = PodConnectionPool::<u32, u32>::new(8);
            // Model: dials without a connection, and connections that are not a moment old yet.
            let (mut connecting, mut fresh, mut busy) = (0u32, 0u32, 0u32);
            for op in ops {
                match op {
                    0 => if pool.take_usable().is_some() { busy += 1 } else { connecting += pool.add_waiter(0) },
                    1 if connecting > 0 => {
                        connecting -= 1;
                        fresh += u32::from(!pool.has_responded());
                        let next = pool.on_connected(0);
                        busy += u32::from(next.handoff.is_some());
                        connecting += next.dials;
                    }
                    2 if fresh > 0 => { fresh -= 1; connecting += pool.on_grace_elapsed(); }
                    3 if busy > 0 => {
                        busy -= 1;
                        connecting += pool.on_first_response(); fresh = 0;
                        let next = pool.on_idle_connection(0);
                        busy += u32::from(next.handoff.is_some());
                        connecting += next.dials;
                    }
                    4 if connecting > 0 => { connecting -= 1; pool.on_dial_failed(); }
                    5 => pool.set_standby(true),
                    6 => pool.set_standby(false),
                    _ => {}
                }
                prop_assert!(pool.dials_under_way() <= 4);
                prop_assert_eq!((pool.dials_in_progress, pool.recently_connected), (connecting, fresh));
                prop_assert!(pool.waiters.is_empty() || pool.dials_under_way() > 0);
                prop_assert!(pool.waiters.is_empty() || pool.pooled.is_empty());
            }
        }
    }
}
