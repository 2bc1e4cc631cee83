//! A local node of one test, and the images that it runs.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::wait::WAIT_TIMEOUT;
use common::local_node::{LocalNodeSpec, LocalPodSpec, PodRunStatus};
use common::wire::NamespacedName;
use local::runtime::OciRuntimeKind;
use local::{LocalNodeConfig, NodeLayout, NodeManager, net};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// A running node, removed on drop.
#[derive(Debug)]
pub struct TestNode {
    /// Paths of the node.
    pub layout: NodeLayout,
    /// Sender of the pods that should run.
    pub orders: watch::Sender<LocalNodeSpec>,
    /// Last status of every pod, by uid.
    pub statuses: BTreeMap<String, PodRunStatus>,
    status_rx: mpsc::Receiver<PodRunStatus>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
    _images: Arc<TestImages>,
    _lock: Option<MutexGuard<'static, ()>>,
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
        let mut node = Self::attach(layout, runtime, credentials);
        node._lock = Some(lock);
        node
    }

    /// Runs the node of a layout, which may already exist.
    pub fn attach(
        layout: NodeLayout,
        runtime: Option<OciRuntimeKind>,
        credentials: Vec<PathBuf>,
    ) -> Self {
        let _ = tracing_subscriber::fmt().with_test_writer().try_init();
        NodeManager::create(&layout).expect("a node: are you root?");
        let (orders, receive_orders) = watch::channel(LocalNodeSpec::default());
        let (statuses, status_rx) = mpsc::channel(64);
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
                .block_on(local::run(config, receive_orders, statuses, token))
                .expect("a node that runs");
        };
        let thread = Some(thread::spawn(serve));
        let statuses = BTreeMap::new();
        Self {
            layout,
            orders,
            statuses,
            status_rx,
            stop,
            thread,
            _images: test_images,
            _lock: None,
        }
    }

    /// Orders exactly these pods.
    pub fn order(&self, pods: impl IntoIterator<Item = LocalPodSpec>) {
        let pods = pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect();
        self.orders.send_modify(|orders| orders.pods = pods);
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

    /// Log of a pod's container so far.
    pub fn log(&self, pod: &str) -> String {
        fs::read_to_string(self.layout.log("default", pod, "web")).unwrap_or_default()
    }

    /// Waits until a container has written `text`, and returns its log.
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
        if self._lock.is_some() {
            let removed = NodeManager::purge(&self.layout);
            assert!(removed.is_ok() || thread::panicking(), "{removed:?}");
        }
    }
}

/// Order for one container `web` of the image `dev.local/app:v1`, with additional fields in `extra`.
pub fn pod_order(uid: &str, args: &[&str], extra: Value) -> LocalPodSpec {
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

/// Directory of the test images, removed with its last user.
#[derive(Debug)]
pub struct TestImages {
    folder: PathBuf,
}

impl std::ops::Deref for TestImages {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.folder
    }
}

impl Drop for TestImages {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns the directory of the test images, with `dev.local/app:v1`, a static program.
pub fn test_images() -> Arc<TestImages> {
    static SHARED_IMAGES: Mutex<Weak<TestImages>> = Mutex::new(Weak::new());
    let mut weak_images = SHARED_IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(images) = weak_images.upgrade() {
        return images;
    }
    let images = Arc::new(TestImages { folder: scratch_directory("images") });
    write_layout(&images.join("dev.local/app"), "v1", &[base_layer()]);
    *weak_images = Arc::downgrade(&images);
    images
}

/// Creates a new temporary directory of this process.
pub fn scratch_directory(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder =
        std::env::temp_dir().join(format!("rouse-test-{name}-{}-{next}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// Executable that test containers run, compiled once.
pub fn test_program() -> &'static [u8] {
    static PROGRAM: OnceLock<Vec<u8>> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folder = scratch_directory("app");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/app.c");
        let program = folder.join("app");
        let mut command = Command::new("cc");
        let status =
            command.args(["-static", "-O1", "-w", "-o"]).arg(&program).arg(source).status();
        assert!(status.expect("a C compiler: apt-get install gcc").success());
        let bytes = fs::read(program).expect("a program");
        fs::remove_dir_all(folder).expect("our own folder");
        bytes
    })
}

/// One entry of a layer.
#[derive(Clone, Copy, Debug)]
pub enum LayerEntry<'a> {
    /// A file with this content; a whiteout is an empty file.
    File(&'a str, &'a [u8]),
    /// A directory at this path.
    Folder(&'a str),
    /// A symbolic link, and its target.
    Link(&'a str, &'a str),
}

/// Builds a layer as a tar archive.
pub fn layer(entries: &[LayerEntry<'_>]) -> Vec<u8> {
    let mut layer = tar::Builder::new(Vec::new());
    for entry in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        let result = match entry {
            LayerEntry::File(path, bytes) => {
                header.set_size(bytes.len() as u64);
                layer.append_data(&mut header, path, *bytes)
            }
            LayerEntry::Folder(path) => {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_size(0);
                layer.append_data(&mut header, path, std::io::empty())
            }
            LayerEntry::Link(path, to) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                layer.append_link(&mut header, path, to)
            }
        };
        result.expect("a layer");
    }
    layer.into_inner().expect("a layer")
}

/// Layer with the program `/app` and the file of users.
pub fn base_layer() -> Vec<u8> {
    layer(&[
        LayerEntry::File("app", test_program()),
        LayerEntry::File("etc/passwd", b"root:x:0:0::/:\nweb:x:7:8::/:\n"),
    ])
}

/// Writes an OCI layout of one image that runs `/app`.
pub fn write_layout(folder: &Path, tag: &str, layers: &[Vec<u8>]) {
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs).expect("a folder");
    let put = |bytes: &[u8], kind: &str| {
        let hash =
            Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        fs::write(blobs.join(&hash), bytes).expect("a blob");
        json!({ "mediaType": kind, "digest": format!("sha256:{hash}"), "size": bytes.len() })
    };
    let describe_layer = |bytes: &Vec<u8>| put(bytes, "application/vnd.oci.image.layer.v1.tar");
    let layers: Vec<Value> = layers.iter().map(describe_layer).collect();
    let digests: Vec<&Value> = layers.iter().map(|layer| &layer["digest"]).collect();
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture, "os": "linux",
        "config": { "Entrypoint": ["/app"], "Env": ["FROM_IMAGE=yes"] },
        "rootfs": { "type": "layers", "diff_ids": digests },
    });
    let config = put(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": layers,
    });
    let mut entry =
        put(manifest.to_string().as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    entry["annotations"] = json!({ "org.opencontainers.image.ref.name": tag });
    let index = json!({ "schemaVersion": 2, "manifests": [entry] });
    fs::write(folder.join("index.json"), index.to_string()).expect("an index");
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("a layout");
}

/// Leftovers of a node on this machine: mounts, cgroups, directories and processes that carry its name.
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
        if status.contains("State:\tZ") {
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
    while zombie_count(name) > 0 {
        assert!(
            started.elapsed() < WAIT_TIMEOUT,
            "{} processes of {name} are not reaped",
            zombie_count(name)
        );
        #[allow(clippy::disallowed_methods, reason = "a test's own thread; no runtime is blocked")]
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn zombie_count(name: &str) -> usize {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let is_zombie_of_node = |entry: &fs::DirEntry| {
        let read = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        read("status").contains("State:\tZ") && read("cgroup").contains(&format!("rouse-{name}"))
    };
    entries.filter(is_zombie_of_node).count()
}
