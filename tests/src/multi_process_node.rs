//! A local node whose components are processes of their own, which a test may kill and start again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use common::fixtures::ports::unused_port;
use local::cgroups::CgroupMounts;
use local::{NodeLayout, net};

use crate::fake_clock::FakeClock;
use crate::leftovers::{FOLDER_PREFIX, record_test_node};
use crate::stored_objects::stored_pods;
use crate::test_node::{find_leftovers, lock_node};
use crate::wait::WAIT_TIMEOUT;

/// Shortest time between two checks of a wait.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Names of all components, as `rouse up --part` takes them.
pub const COMPONENTS: [&str; 4] = ["controller", "autoscaler", "activator", "agent"];

/// A node made of processes; purged on drop.
#[derive(Debug)]
pub struct MultiProcessNode {
    /// Paths of the node.
    pub layout: NodeLayout,
    processes: Mutex<BTreeMap<&'static str, Child>>,
    folder: PathBuf,
    gateway: SocketAddr,
    /// Further options of `rouse up`, for each component.
    up_options: Vec<String>,
    /// Cgroup of this process before it joined that of the clients.
    original_cgroup: PathBuf,
    clock: Option<FakeClock>,
    _lock: MutexGuard<'static, ()>,
}

impl MultiProcessNode {
    /// Prepares a node without starting it.
    pub fn new(test: &str) -> Self {
        let lock = lock_node();
        let name = format!("{test}-{}", std::process::id());
        let layout = NodeLayout::new(&name).expect("a short name");
        record_test_node(&layout);
        let folder = std::env::temp_dir().join(format!("{FOLDER_PREFIX}{name}"));
        fs::create_dir_all(&folder).expect("a folder");
        let gateway = SocketAddr::from((Ipv4Addr::LOCALHOST, unused_port()));
        let processes = Mutex::default();
        Self {
            layout,
            processes,
            folder,
            gateway,
            up_options: Vec::new(),
            original_cgroup: own_cgroup(),
            clock: None,
            _lock: lock,
        }
    }

    /// Prepares a node whose components all get further options of `rouse up`.
    pub fn with_options(test: &str, options: &[&str]) -> Self {
        let mut node = Self::new(test);
        node.up_options = options.iter().copied().map(str::to_owned).collect();
        node
    }

    /// Prepares a node with a clock that the test sets.
    pub fn with_clock(test: &str) -> Self {
        let mut node = Self::new(test);
        node.clock = Some(FakeClock::new(&node.folder));
        node
    }

    /// Sets the clock of all components, now running and later started ones, `offset_s` seconds off the machine's.
    pub fn set_clock_offset(&self, offset_s: i64) {
        self.clock.as_ref().expect("a node with a clock").set_offset(offset_s);
    }

    /// Starts these components at the same moment, each as a process; `node` has all in one. Waits until they are
    /// ready.
    pub fn start(&self, components: &[&'static str]) {
        for component in components {
            let _ = fs::remove_file(self.ready_file(component));
            let process = self.spawn(component);
            self.processes().insert(component, process);
        }
        for component in components {
            wait_for(&format!("{component} to be ready"), || {
                let ended =
                    self.processes().get_mut(component).and_then(|child| child.try_wait().ok()?);
                assert!(
                    ended.is_none(),
                    "{component} ended with {ended:?}:\n{}",
                    self.component_log(component)
                );
                self.ready_file(component).exists().then_some(())
            });
        }
    }

    fn processes(&self) -> MutexGuard<'_, BTreeMap<&'static str, Child>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ready_file(&self, component: &str) -> PathBuf {
        self.folder.join(format!("{component}.ready"))
    }

    fn spawn(&self, component: &str) -> Child {
        let log = self.folder.join(format!("{component}.log"));
        let log = File::options().create(true).append(true).open(log).expect("a log");
        let mut up_command = self.command(&["up", "--images", &required_variable("ROUSE_IMAGES")]);
        up_command.args(["--gateway", &self.gateway.to_string(), "--ready-file"]);
        up_command.arg(self.ready_file(component)).args(&self.up_options);
        if component != "node" {
            up_command.args(["--part", component]);
        }
        if let Some(clock) = &self.clock {
            clock.apply_to(&mut up_command);
        }
        // Moved out of the clients' cgroup, in which this process may be.
        let procs_file = self.original_cgroup.join("cgroup.procs");
        up_command.stdout(log.try_clone().expect("a log")).stderr(log);
        let child = up_command.spawn().expect("the rouse program");
        fs::write(procs_file, child.id().to_string()).expect("the cgroup we came from");
        child
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(required_variable("ROUSE_BIN"));
        command.args(["--node", self.layout.name()]).args(args);
        command.env("NO_COLOR", "1").stdin(Stdio::null());
        command
    }

    /// Kills a component by SIGKILL and waits until it is gone.
    pub fn kill(&self, component: &str) {
        let mut child = self.processes().remove(component).expect("a component that runs");
        child.kill().expect("a process of ours");
        child.wait().expect("a child");
    }

    /// Id of the process of a component that runs.
    pub fn process_id(&self, component: &str) -> u32 {
        self.processes().get(component).expect("a component that runs").id()
    }

    /// Waits for every process, and asserts that it ended with success.
    pub fn wait_for_exit(&self) {
        for (component, mut child) in std::mem::take(&mut *self.processes()) {
            let ended = child.wait();
            assert!(
                ended.as_ref().is_ok_and(std::process::ExitStatus::success),
                "{component}: {ended:?}"
            );
        }
    }

    /// Runs `rouse --node … ARGS` and returns its output.
    pub fn run_rouse(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the rouse program")
    }

    /// Applies a manifest with `rouse apply`.
    pub fn apply(&self, manifest: &str) {
        let file = self.folder.join("manifest.yaml");
        fs::write(&file, manifest).expect("a file");
        let result = self.run_rouse(&["apply", "-f", file.to_str().expect("a path")]);
        assert!(result.status.success(), "{result:?}");
    }

    /// Log of a component so far.
    pub fn component_log(&self, component: &str) -> String {
        fs::read_to_string(self.folder.join(format!("{component}.log"))).unwrap_or_default()
    }

    /// Names of a service's pods, as users see them.
    pub fn pods(&self, service: &str) -> Vec<String> {
        let selector = format!("serving.knative.dev/service={service}");
        let output = self.run_rouse(&["get", "pods", "-l", &selector, "-o", "name"]);
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
    }

    /// Waits until a service has no pod.
    pub fn wait_asleep(&self, service: &str) {
        wait_for(&format!("service {service} to sleep"), || {
            let is_asleep =
                stored_pods(&self.layout, service).is_empty() && self.pods(service).is_empty();
            is_asleep.then_some(())
        });
    }

    /// ClusterIP of a service, once the node's DNS knows it. This process must not be a client yet.
    pub fn cluster_ip(&self, service: &str) -> SocketAddr {
        self.cluster_ips(&[service])[0]
    }

    /// ClusterIPs of services in their order, once the node's DNS knows all of them. This process must not be a client
    /// yet.
    pub fn cluster_ips(&self, services: &[impl Display]) -> Vec<SocketAddr> {
        let names = services.iter().map(|service| format!("{service}.default.svc.cluster.local"));
        let names: Vec<String> = names.collect();
        let mut args = vec!["run", "--", "getent", "ahostsv4"];
        args.extend(names.iter().map(String::as_str));
        wait_for(&format!("the addresses of {names:?}"), || {
            let output = self.run_rouse(&args);
            let text = String::from_utf8_lossy(&output.stdout);
            // One line for each kind of socket: `10.96.0.7 STREAM hello.default.svc.cluster.local`.
            let streams = text.lines().filter(|line| line.contains("STREAM"));
            let ip = |line: &str| line.split_whitespace().next()?.parse::<IpAddr>().ok();
            let addresses: Vec<SocketAddr> =
                streams.filter_map(ip).map(|ip| SocketAddr::new(ip, 80)).collect();
            (addresses.len() == services.len()).then_some(addresses)
        })
    }

    /// Makes this process a client: programs see its connects once its threads
    /// [`enter_client_netns`](Self::enter_client_netns) the namespace.
    pub fn join_client_cgroup(&self) {
        let mounts = CgroupMounts::find().expect("cgroup v2");
        let procs = self.layout.clients_cgroup(&mounts.v2).join("cgroup.procs");
        fs::write(procs, "0").expect("a clients' cgroup");
    }

    /// Moves this process out of the clients' cgroup, because `down` kills all processes in the node's cgroups.
    pub fn leave_client_cgroup(&self) {
        fs::write(self.original_cgroup.join("cgroup.procs"), "0").expect("the cgroup we came from");
    }

    /// Moves the calling thread into the clients' network namespace.
    pub fn enter_client_netns(&self) {
        let namespace =
            net::open_namespace(&self.layout.client_namespace()).expect("a client namespace");
        net::enter_namespace(namespace.as_fd()).expect("root");
    }

    /// Value of a component's metric, read from its admin port in the node's namespace.
    pub fn metric(&self, port: u16, name: &str) -> Option<f64> {
        let fetch = || {
            let namespace = net::open_namespace(&self.layout.node_namespace()).ok()?;
            net::enter_namespace(namespace.as_fd()).ok()?;
            let mut stream = TcpStream::connect((IpAddr::from([127, 0, 0, 1]), port)).ok()?;
            let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
            stream.write_all(request.as_bytes()).ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line?.trim().parse().ok()
        };
        thread::scope(|scope| scope.spawn(fetch).join()).expect("no panic")
    }

    /// Ids of the maps that this node has pinned.
    pub fn pinned_maps(&self) -> BTreeSet<u32> {
        let version = format!("v{}", datapath::abi::ABI_VERSION);
        let entries = fs::read_dir(self.layout.bpf().join(version)).into_iter().flatten().flatten();
        let pins = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        pins.map(|pin| {
            let info = aya::maps::MapInfo::from_pin(pin.path()).expect("a pinned map");
            info.id()
        })
        .collect()
    }

    /// The network namespaces of this node.
    pub fn namespaces(&self) -> OpenNamespaces {
        let entries = fs::read_dir(self.layout.namespaces()).into_iter().flatten().flatten();
        let open = |entry: fs::DirEntry| {
            let file = File::open(entry.path()).ok()?;
            Some((file.metadata().ok()?.ino(), file))
        };
        OpenNamespaces(entries.filter_map(open).collect())
    }
}

/// Network namespaces by inode. They are open: the kernel gives the inode of one that is gone to the next.
#[derive(Debug)]
pub struct OpenNamespaces(BTreeMap<u64, File>);

impl OpenNamespaces {
    /// Inodes of the namespaces.
    pub fn inodes(&self) -> BTreeSet<u64> {
        self.0.keys().copied().collect()
    }
}

impl Drop for MultiProcessNode {
    #[allow(clippy::print_stdout, reason = "a failed test shows what its components logged")]
    fn drop(&mut self) {
        self.leave_client_cgroup();
        let result = self.run_rouse(&["down", "--purge"]);
        for child in self.processes().values_mut() {
            let _ = child.wait();
        }
        if thread::panicking() {
            COMPONENTS.iter().chain(&["node"]).for_each(|component| {
                println!("== {component}\n{}", self.component_log(component))
            });
        } else {
            assert!(result.status.success(), "{result:?}");
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Leftovers of a node: its named objects, and processes and maps that still use its namespaces and map ids.
pub fn find_remains(
    layout: &NodeLayout,
    namespaces: &OpenNamespaces,
    maps: &BTreeSet<u32>,
) -> Vec<String> {
    let mut remains = find_leftovers(layout.name());
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let inode = fs::metadata(entry.path().join("ns/net")).map(|meta| meta.ino());
        if inode.is_ok_and(|inode| namespaces.0.contains_key(&inode)) {
            remains.push(format!("{} in a namespace of the node", entry.path().display()));
        }
    }
    let loaded = agent::kernel::sys::map_ids().filter(|id| maps.contains(id));
    remains.extend(loaded.map(|id| format!("BPF map {id}")));
    remains
}

/// One response of the sample application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloResponse {
    /// Status code of the response.
    pub status: u16,
    /// Name of the pod that responded.
    pub pod: String,
    /// True if the pod saw this client as its peer, and not the activator.
    pub direct: bool,
    /// Body of the response as text.
    pub body: String,
}

/// A persistent connection to a service.
#[derive(Debug)]
pub struct PersistentConnection(TcpStream);

impl PersistentConnection {
    /// Connects to an address, with a timeout for each later read.
    pub fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, WAIT_TIMEOUT)?;
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        Ok(Self(stream))
    }

    /// Sends one request and reads the response, which must have a content-length.
    pub fn get(&mut self, path: &str) -> io::Result<HelloResponse> {
        write!(self.0, "GET {path} HTTP/1.1\r\nHost: test\r\n\r\n")?;
        let mut bytes = Vec::new();
        let head = loop {
            self.read_into(&mut bytes)?;
            if let Some(head_end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break head_end + 4;
            }
        };
        let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
        let header = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            line.unwrap_or_default().to_owned()
        };
        let length: usize = header("content-length").parse().unwrap_or(0);
        while bytes.len() < head + length {
            self.read_into(&mut bytes)?;
        }
        let status = text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        let direct = header("x-peer") == self.0.local_addr()?.ip().to_string();
        let body = String::from_utf8_lossy(&bytes[head..]).into_owned();
        Ok(HelloResponse { status, pod: header("x-pod"), direct, body })
    }

    fn read_into(&mut self, bytes: &mut Vec<u8>) -> io::Result<()> {
        let mut buffer = [0; 4096];
        match self.0.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                bytes.extend_from_slice(&buffer[..count]);
                Ok(())
            }
        }
    }
}

/// Sends one request on a new connection.
pub fn get_once(address: SocketAddr, path: &str) -> io::Result<HelloResponse> {
    PersistentConnection::open(address)?.get(path)
}

/// Calls `check` until it returns a value; `None` after [`WAIT_TIMEOUT`].
#[allow(clippy::disallowed_methods, reason = "a test's own thread; no runtime is blocked")]
pub fn poll_until<T>(mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let started = Instant::now();
    while started.elapsed() < WAIT_TIMEOUT {
        let checked_at = Instant::now();
        let value = check();
        if value.is_some() {
            return value;
        }
        // A check that starts a process takes a third of the time at most, as in other waits.
        thread::sleep(POLL_INTERVAL.max(checked_at.elapsed() * 2));
    }
    None
}

/// Calls `check` until it returns a value; panics after [`WAIT_TIMEOUT`].
pub fn wait_for<T>(description: &str, check: impl FnMut() -> Option<T>) -> T {
    poll_until(check).unwrap_or_else(|| panic!("waited for {description}"))
}

fn required_variable(name: &str) -> String {
    let value = std::env::var(name);
    value.unwrap_or_else(|_| panic!("{name} is not set: run `cargo xtask test --tier local`"))
}

/// Directory of the cgroup v2 of this process.
fn own_cgroup() -> PathBuf {
    let text = fs::read_to_string("/proc/self/cgroup").expect("/proc");
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).expect("cgroup v2");
    let mounts = CgroupMounts::find().expect("cgroup v2");
    mounts.v2.join(Path::new(path).strip_prefix("/").expect("an absolute path"))
}
