//! Shell: an agent that tests use one after the other, because its start takes longer than most of them.

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use super::*;
use crate::{fixture::BEFORE_LOAD, sys};

/// A node with an agent that runs, and with another pod for each test.
///
/// For tests in which the agent does not restart, and which compare its counters with their values at the begin of the
/// test. Before the drop, their clients have ended, and the pod was ready.
pub(super) struct SharedAgentFixture(Option<AgentFixture>);

/// The node that no test uses at the moment.
static IDLE_NODE: Mutex<Option<AgentFixture>> = Mutex::new(None);

impl SharedAgentFixture {
    pub(super) fn new() -> Self {
        let idle = lock_idle_node().take();
        Self(Some(idle.unwrap_or_else(start_node)))
    }
}

impl Deref for SharedAgentFixture {
    type Target = AgentFixture;

    fn deref(&self) -> &AgentFixture {
        self.0.as_ref().expect("taken by drop alone")
    }
}

impl DerefMut for SharedAgentFixture {
    fn deref_mut(&mut self) -> &mut AgentFixture {
        self.0.as_mut().expect("taken by drop alone")
    }
}

impl Drop for SharedAgentFixture {
    fn drop(&mut self) {
        static AT_EXIT: Once = Once::new();
        let Some(mut node) = self.0.take() else { return };
        // After a failure the next test gets a new node.
        if thread::panicking() {
            return;
        }
        node.exchange_pod();
        BEFORE_LOAD.get_or_init(|| end_idle_agent);
        AT_EXIT.call_once(|| sys::at_exit(remove_idle_node));
        *lock_idle_node() = Some(node);
    }
}

fn lock_idle_node() -> MutexGuard<'static, Option<AgentFixture>> {
    IDLE_NODE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the agent that no test uses. Otherwise it would run beside all later tests.
fn end_idle_agent() {
    drop(lock_idle_node().take());
}

fn start_node() -> AgentFixture {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut node = AgentFixture::new(&format!("shared{number}"));
    node.agent = Some(spawn_beyond_the_test(node.agent_command()));
    node.wait_attached();
    node
}

/// Starts a process by a thread that does not end: the signal at the parent's death, which the agent asked for, follows
/// the thread that started it.
fn spawn_beyond_the_test(mut command: Command) -> Child {
    let (send, spawned) = mpsc::channel();
    thread::spawn(move || {
        let _test_waits = send.send(command.spawn());
        thread::sleep(Duration::MAX);
    });
    spawned.recv().expect("the thread sends it").expect("nsenter")
}

/// Removes the node at the end of the process. Its runtime stays, because the values of the thread that it needs to end
/// are gone.
fn remove_idle_node() {
    let Some(mut node) = lock_idle_node().take() else { return };
    node.kill_agent();
    remove_node(&node.name);
    std::mem::forget(node);
}

impl AgentFixture {
    /// Removes the pod and all routes, and prepares the next pod.
    fn exchange_pod(&mut self) {
        let revision = NamespacedName::new("default", "hello-00001");
        self.routes.remove(&RouteKey::Service(NamespacedName::new("default", "hello")));
        self.routes.remove(&RouteKey::Pod(self.pod_uid()));
        self.routes.remove(&RouteKey::Revision(revision));
        if let Some(mut pod) = self.pod.take() {
            let _ended_already = pod.kill();
            let _waited_already = pod.wait();
        }
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !self.slots().is_empty() {
            assert!(Instant::now() < deadline, "the agent never forgets the pod");
            thread::sleep(Duration::from_millis(10));
        }
        remove_cgroup(&self.pod_cgroup());
        self.pod_number += 1;
        fs::create_dir_all(self.pod_cgroup().join("main")).expect("a cgroup");
        self.request_timeout = REQUEST_TIMEOUT;
        self.standby = None;
        self.pods.clear();
        self.totals.clear();
        // Reports about pods that are gone.
        self.reports.try_iter().for_each(drop);
        self.usages.try_iter().for_each(drop);
    }
}
