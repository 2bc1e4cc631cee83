//! A local node of one test.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::images::{TestImages, test_images};
use crate::wait::WAIT_TIMEOUT;
use common::local_node::{LocalNodeSpec, LocalPodSpec, PodRunStatus};
use common::wire::NamespacedName;
use local::runtime::OciRuntimeKind;
use local::{LocalNodeConfig, NodeLayout, NodeManager, net};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// A running node, removed on drop unless it was [attached](TestNode::attach).
#[derive(Debug)]
pub struct TestNode {
    /// Paths of the node.
    pub layout: NodeLayout,
    /// Sender of the pods that should run, and of the names that should be resolved.
    pub node_spec: watch::Sender<LocalNodeSpec>,
    /// Last status of every pod, by uid.
    pub statuses: BTreeMap<String, PodRunStatus>,
    status_rx: mpsc::Receiver<PodRunStatus>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
    _images: Arc<TestImages>,
    /// Lock of a node that this test has created, and that is removed on drop; `None` for an attached node.
    node_lock: Option<MutexGuard<'static, ()>>,
}

/// Takes the lock for one node at a time, because two nodes would wait for each other's kernel locks. The first call
/// removes leftovers of killed runs.
pub(crate) fn lock_node() -> MutexGuard<'static, ()> {
    static NODE_LOCK: Mutex<()> = Mutex::new(());
    static LEFTOVERS_REMOVED: Once = Once::new();
    let lock = NODE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    LEFTOVERS_REMOVED.call_once(crate::leftovers::remove_leftovers);
    lock
}

impl TestNode {
    /// Starts a new node for a test.
    pub fn new(test: &str) -> Self {
        Self::with_runtime(test, None, Vec::new())
    }

    /// Starts a new node with this runtime and these credential files.
    pub fn with_runtime(
        test: &str,
        runtime: Option<OciRuntimeKind>,
        credentials: Vec<PathBuf>,
    ) -> Self {
        let lock = lock_node();
        let layout =
            NodeLayout::new(&format!("{test}-{}", std::process::id())).expect("a short name");
        NodeManager::purge(&layout).expect("no leftovers");
        crate::leftovers::record_test_node(&layout);
        let mut node = Self::attach(layout, runtime, credentials);
        node.node_lock = Some(lock);
        node
    }

    /// Runs the node of a layout, which may already exist. The node stays on drop: only nodes of
    /// [`with_runtime`](Self::with_runtime) are removed.
    pub fn attach(
        layout: NodeLayout,
        runtime: Option<OciRuntimeKind>,
        credentials: Vec<PathBuf>,
    ) -> Self {
        let _ = tracing_subscriber::fmt().with_test_writer().try_init();
        NodeManager::create(&layout).expect("a node: are you root?");
        let (node_spec, node_spec_rx) = watch::channel(LocalNodeSpec::default());
        let (status_tx, status_rx) = mpsc::channel(64);
        let stop = CancellationToken::new();
        let host_network = Arc::new(net::current_namespace().expect("a network namespace"));
        let test_images = test_images();
        let images = Some(test_images.to_path_buf());
        let config =
            LocalNodeConfig { layout: layout.clone(), images, runtime, host_network, credentials };
        let token = stop.clone();
        let serve = move || {
            NodeManager::enter(&config.layout).expect("the node's namespace");
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            let builder = builder.worker_threads(2).enable_all();
            let runtime = builder.build().expect("a runtime");
            runtime
                .block_on(local::run(config, node_spec_rx, status_tx, token))
                .expect("a node that runs");
        };
        let thread = Some(thread::spawn(serve));
        let statuses = BTreeMap::new();
        Self {
            layout,
            node_spec,
            statuses,
            status_rx,
            stop,
            thread,
            _images: test_images,
            node_lock: None,
        }
    }

    /// Makes the node run exactly these pods.
    pub fn set_pods(&self, pods: impl IntoIterator<Item = LocalPodSpec>) {
        let pods = pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect();
        self.node_spec.send_modify(|spec| spec.pods = pods);
    }

    /// Waits until `is_done` returns true for the statuses.
    pub fn wait(
        &mut self,
        description: &str,
        is_done: impl Fn(&BTreeMap<String, PodRunStatus>) -> bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.expect("a runtime");
        while !is_done(&self.statuses) {
            let next = runtime.block_on(async {
                tokio::time::timeout(WAIT_TIMEOUT, self.status_rx.recv()).await
            });
            let Ok(Some(status)) = next else {
                panic!("timeout: {description}; statuses: {:#?}", self.statuses)
            };
            self.statuses.insert(status.uid.clone(), status);
        }
    }

    /// Waits for a state of one pod, and returns its status.
    pub fn wait_pod(
        &mut self,
        description: &str,
        uid: &str,
        is_done: impl Fn(&PodRunStatus) -> bool,
    ) -> PodRunStatus {
        self.wait(description, |all| all.get(uid).is_some_and(&is_done));
        self.statuses[uid].clone()
    }

    /// Log so far of the container `web` of the pod with this name.
    pub fn log(&self, pod: &str) -> String {
        fs::read_to_string(self.layout.log("default", pod, "web")).unwrap_or_default()
    }

    /// Waits until the container `web` of a pod has written `text`, and returns its log.
    pub fn wait_log(&self, pod: &str, text: &str) -> String {
        for _ in 0..600 {
            let log = self.log(pod);
            if log.contains(text) {
                return log;
            }
            crate::wait::sleep(Duration::from_millis(100));
        }
        panic!("{pod} never wrote {text:?}: {:?}", self.log(pod));
    }

    /// Runs `work` in the clients' network namespace.
    pub fn in_client_netns<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace =
            net::open_namespace(&self.layout.client_namespace()).expect("a client namespace");
        let inside = || {
            net::enter_namespace(namespace.as_fd()).expect("root");
            work()
        };
        thread::scope(|scope| scope.spawn(inside).join()).expect("no panic inside")
    }

    /// Ends the node's thread; its pods keep running.
    pub fn detach(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the node panicked");
        }
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.detach();
        if self.node_lock.is_some() {
            let removed = NodeManager::purge(&self.layout);
            assert!(removed.is_ok() || thread::panicking(), "{removed:?}");
        }
    }
}

/// Spec of a pod with one container `web` of the image `dev.local/app:v1`. `extra` may contain the objects `container`
/// and `pod`, whose fields are added to the container and to the pod's spec, or replace theirs.
pub fn pod_spec(uid: &str, args: &[&str], extra: Value) -> LocalPodSpec {
    let mut container = json!({ "name": "web", "image": "dev.local/app:v1", "args": args });
    let extra_container =
        extra.get("container").and_then(Value::as_object).cloned().unwrap_or_default();
    container.as_object_mut().expect("an object").extend(extra_container);
    let mut spec = json!({ "containers": [container], "terminationGracePeriodSeconds": 5 });
    let extra_pod = extra.get("pod").and_then(Value::as_object).cloned().unwrap_or_default();
    spec.as_object_mut().expect("an object").extend(extra_pod);
    LocalPodSpec {
        uid: uid.to_owned(),
        name: format!("pod-{uid}"),
        revision: NamespacedName::new("default", "hello-00001"),
        spec: serde_json::from_value(spec).expect("a pod spec"),
        labels: BTreeMap::new(),
        kubelet_probes: false,
    }
}

/// Leftovers of a node on this machine: mounts, cgroups and processes that carry its name, and its run folder.
pub fn find_leftovers(name: &str) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mounts.lines().filter(|line| line.contains(name)).map(str::to_owned);
    let mut leftovers: Vec<String> = mounts.collect();
    let output = Command::new("find")
        .args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", &format!("rouse-{name}")])
        .output();
    leftovers
        .extend(String::from_utf8_lossy(&output.expect("find").stdout).lines().map(str::to_owned));
    leftovers
        .extend([format!("/run/rouse/{name}")].into_iter().filter(|path| Path::new(path).exists()));
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let cgroup = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        // A process that has ended since its cgroup was read has no status.
        if status.is_empty() || status.contains("State:\tZ") {
            continue;
        }
        if cgroup.contains(&format!("rouse-{name}")) {
            leftovers.push(format!("process {}: {cgroup}", entry.path().display()));
        }
    }
    leftovers
}

/// First address of a pod.
pub fn pod_ip(status: &PodRunStatus) -> IpAddr {
    *status.addresses.first().expect("a running pod has an address")
}

/// Waits until this process has no zombie child in the cgroups of the node `name`: a command in progress may end
/// later than its pod.
pub fn wait_reaped(name: &str) {
    let started = std::time::Instant::now();
    loop {
        let zombies = zombies_of(name);
        if zombies.is_empty() {
            return;
        }
        assert!(started.elapsed() < WAIT_TIMEOUT, "not reaped: {zombies:#?}");
        #[allow(clippy::disallowed_methods, reason = "a test's own thread; no runtime is blocked")]
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Status and cgroups of each zombie in the cgroups of the node.
fn zombies_of(name: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let zombie = |entry: fs::DirEntry| {
        let read = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        let (status, cgroups) = (read("status"), read("cgroup"));
        let is_zombie_of_node =
            status.contains("State:\tZ") && cgroups.contains(&format!("rouse-{name}"));
        is_zombie_of_node.then(|| status + &cgroups)
    };
    entries.filter_map(zombie).collect()
}
