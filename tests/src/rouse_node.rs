//! A whole local node, operated by the `rouse` command as a user would.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use common::fixtures::ports::unused_port;
use local::cgroups::CgroupMounts;
use local::{NodeLayout, net};
use serde_json::Value;

use crate::fake_clock::FakeClock;
use crate::frozen_pods::frozen_pods;
use crate::leftovers::{FOLDER_PREFIX, record_test_node};
use crate::stored_objects::{stored_object, stored_pods};
use crate::test_node::lock_node;
use crate::tls_files::TlsFiles;
use crate::wait::wait_for;

/// A running node with all its components; removed on drop.
#[derive(Debug)]
pub struct RouseNode {
    /// Paths of the node.
    pub layout: NodeLayout,
    /// Address of its gateway for requests from outside.
    pub gateway: SocketAddr,
    /// Address of its only gateway port, for services of raw TCP.
    pub gateway_port: SocketAddr,
    /// Address of its gateway for TLS; `None` if it was started without certificates.
    pub tls_gateway: Option<SocketAddr>,
    program: PathBuf,
    folder: PathBuf,
    process: Child,
    /// Number of manifests that were applied. Each has a file of its own, because scenarios apply theirs at the same
    /// time.
    applied: AtomicUsize,
    /// Cgroup of this process before it joined that of the clients.
    original_cgroup: PathBuf,
    _lock: MutexGuard<'static, ()>,
}

/// One condition of an object.
#[derive(Clone, Debug, Default)]
pub struct ObjectCondition {
    /// `True`, `False` or `Unknown`; empty if the object has no such condition.
    pub status: String,
    /// Reason of the status, one word.
    pub reason: String,
    /// Message for users, one line.
    pub message: String,
}

impl ObjectCondition {
    /// Reads the condition of this type from an object.
    fn find(object: &Value, condition: &str) -> Self {
        let conditions = object["status"]["conditions"].as_array();
        let found = conditions.into_iter().flatten().find(|one| one["type"] == condition);
        let field =
            |key: &str| found.and_then(|one| one[key].as_str()).unwrap_or_default().to_owned();
        Self { status: field("status"), reason: field("reason"), message: field("message") }
    }
}

impl RouseNode {
    /// Starts a node and waits until every component is ready.
    pub fn start(test: &str) -> Self {
        Self::start_with(test, |_, _| {})
    }

    /// Starts a node with further options of `rouse up`.
    pub fn start_with_options(test: &str, options: &[&str]) -> Self {
        Self::start_with(test, |up_command, _| {
            up_command.args(options);
        })
    }

    /// Starts a node with a clock that the test sets.
    pub fn start_with_clock(test: &str) -> (Self, FakeClock) {
        let mut clock = None;
        let node = Self::start_with(test, |up_command, folder| {
            clock.insert(FakeClock::new(folder)).apply_to(up_command)
        });
        (node, clock.expect("it was made"))
    }

    /// Starts a node with these certificate files: the pair, and the folder of pairs.
    pub fn start_with_tls(test: &str, files: &TlsFiles) -> Self {
        let tls_gateway = SocketAddr::from((Ipv4Addr::LOCALHOST, unused_port()));
        let mut node = Self::start_with(test, |up_command, _| {
            up_command.arg("--tls-cert").arg(files.certificate());
            up_command.arg("--tls-key").arg(files.key());
            up_command.arg("--tls-folder").arg(files.folder());
            up_command.args(["--tls-gateway", &tls_gateway.to_string()]);
        });
        node.tls_gateway = Some(tls_gateway);
        node
    }

    fn start_with(test: &str, prepare: impl FnOnce(&mut Command, &Path)) -> Self {
        let lock = lock_node();
        let name = format!("{test}-{}", std::process::id());
        let program = PathBuf::from(required_variable("ROUSE_BIN"));
        let folder = std::env::temp_dir().join(format!("{FOLDER_PREFIX}{name}"));
        fs::create_dir_all(&folder).expect("a folder");
        let layout = NodeLayout::new(&name).expect("a short name");
        record_test_node(&layout);
        let gateway = SocketAddr::from((Ipv4Addr::LOCALHOST, unused_port()));
        let gateway_port = SocketAddr::from((Ipv4Addr::LOCALHOST, unused_port()));
        let log = File::create(folder.join("log")).expect("a log");
        let mut up_command = Command::new(&program);
        up_command.args(["--node", &name, "up", "--images", &required_variable("ROUSE_IMAGES")]);
        up_command
            .args(["--gateway", &gateway.to_string()])
            .args(["--gateway-ports", &gateway_port.port().to_string(), "--ready-file"])
            .arg(folder.join("ready"));
        up_command.env("NO_COLOR", "1").stdin(Stdio::null());
        up_command.stdout(log.try_clone().expect("a log")).stderr(log);
        prepare(&mut up_command, &folder);
        let process = up_command.spawn().expect("the rouse program");
        let original_cgroup = own_cgroup();
        let applied = AtomicUsize::new(0);
        let mut node = Self {
            layout,
            gateway,
            gateway_port,
            tls_gateway: None,
            program,
            folder,
            process,
            applied,
            original_cgroup,
            _lock: lock,
        };
        node.wait_until_ready();
        node.join_client_cgroup();
        node
    }

    fn wait_until_ready(&mut self) {
        let ready = self.folder.join("ready");
        wait_for("a node that is ready", || {
            let ended = self.process.try_wait().expect("a child");
            assert!(ended.is_none(), "`rouse up` ended with {ended:?}:\n{}", self.log());
            ready.exists().then_some(())
        });
    }

    /// Moves this process into the clients' cgroup, to which the eBPF programs are attached. Its threads enter the
    /// clients' network namespace one by one.
    fn join_client_cgroup(&self) {
        let mounts = CgroupMounts::find().expect("cgroup v2");
        let procs = self.layout.clients_cgroup(&mounts.v2).join("cgroup.procs");
        fs::write(procs, "0").expect("a clients' cgroup");
    }

    /// Runs `work` on a thread inside the clients' network namespace.
    pub fn in_client_netns<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter_client_netns();
                work()
            });
            thread.join().expect("no panic inside")
        })
    }

    /// Moves the calling thread into the clients' network namespace.
    pub fn enter_client_netns(&self) {
        let namespace =
            net::open_namespace(&self.layout.client_namespace()).expect("a client namespace");
        net::enter_namespace(namespace.as_fd()).expect("root");
    }

    /// Runs `rouse --node … ARGS`, which may fail.
    pub fn try_run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(&self.program);
        command.args(["--node", self.layout.name()]).args(args).stdin(Stdio::null());
        command.output().expect("the rouse program")
    }

    /// Runs `rouse --node … ARGS`, which must succeed, and returns its output.
    pub fn run_rouse(&self, args: &[&str]) -> String {
        let output = self.try_run(args);
        assert!(output.status.success(), "rouse {args:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Applies a manifest. Returns true if that succeeded, with all that was printed.
    pub fn apply(&self, manifest: &str) -> (bool, String) {
        let number = self.applied.fetch_add(1, Ordering::Relaxed);
        let file = self.folder.join(format!("manifest-{number}.yaml"));
        fs::write(&file, manifest).expect("a file");
        let output = self.try_run(&["apply", "-f", file.to_str().expect("a path")]);
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).expect("text"))
    }

    /// An object as JSON; null if there is none.
    pub fn get_object(&self, kind: &str, name: &str) -> Value {
        let output = self.try_run(&["get", kind, name, "-o", "json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// Pods of a service as `rouse get` lists them.
    pub fn pods(&self, service: &str) -> Vec<Value> {
        let selector = format!("serving.knative.dev/service={service}");
        let text = self.run_rouse(&["get", "pods", "-l", &selector, "-o", "json"]);
        let list: Value = serde_json::from_str(&text).expect("a list");
        list["items"].as_array().cloned().expect("items")
    }

    /// Pods of a service as the controller has stored them, read without a process: for waits and figures.
    pub fn stored_pods(&self, service: &str) -> Vec<Value> {
        stored_pods(&self.layout, service)
    }

    /// Condition of an object by its type.
    pub fn condition(&self, kind: &str, name: &str, condition: &str) -> ObjectCondition {
        ObjectCondition::find(&self.get_object(kind, name), condition)
    }

    /// Condition of an object as the controller has stored it, read without a process. `kind` is the plural in small
    /// letters.
    pub fn stored_condition(&self, kind: &str, name: &str, condition: &str) -> ObjectCondition {
        ObjectCondition::find(&stored_object(&self.layout, kind, name), condition)
    }

    /// Waits until a service is ready, and returns its ClusterIP from the node's DNS.
    pub fn wait_ready(&self, service: &str) -> SocketAddr {
        wait_for(&format!("service {service} to be ready"), || {
            let stored = self.stored_condition("services", service, "Ready");
            let is_ready = stored.status == "True"
                && self.condition("ksvc", service, "Ready").status == "True";
            is_ready.then_some(())
        });
        self.cluster_ip(service)
    }

    /// ClusterIP of a service with its HTTP port, once the node's DNS knows it.
    pub fn cluster_ip(&self, service: &str) -> SocketAddr {
        self.resolve_cluster_ip(service, "ahostsv4", |_| true)
    }

    /// IPv6 ClusterIP of a service with its HTTP port, once the node's DNS knows it.
    pub fn cluster_ipv6(&self, service: &str) -> SocketAddr {
        // Without an IPv6 address, getent prints the mapped IPv4 address.
        self.resolve_cluster_ip(service, "ahostsv6", |ip| ip.to_canonical().is_ipv6())
    }

    /// First ClusterIP of a service in a database of getent, once `is_wanted` returns true for it.
    fn resolve_cluster_ip(
        &self,
        service: &str,
        database: &str,
        is_wanted: impl Fn(&IpAddr) -> bool,
    ) -> SocketAddr {
        let name = format!("{service}.default.svc.cluster.local");
        wait_for(&format!("the address of {name} in {database}"), || {
            let output = self.try_run(&["run", "--", "getent", database, &name]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let ip: IpAddr = text.split_whitespace().next()?.parse().ok()?;
            is_wanted(&ip).then_some(SocketAddr::new(ip, 80))
        })
    }

    /// Waits until a service has no pod.
    pub fn wait_asleep(&self, service: &str) {
        wait_for(&format!("service {service} to sleep"), || {
            let is_asleep = self.stored_pods(service).is_empty() && self.pods(service).is_empty();
            is_asleep.then_some(())
        });
    }

    /// Names of the pods of a service that are frozen.
    pub fn frozen_pods(&self, service: &str) -> BTreeSet<String> {
        self.select_frozen(&self.pods(service))
    }

    /// Names of those of these pods that are frozen.
    fn select_frozen(&self, pods: &[Value]) -> BTreeSet<String> {
        let frozen_uids = frozen_pods(&self.layout);
        let is_frozen =
            |meta: &&Value| meta["uid"].as_str().is_some_and(|uid| frozen_uids.contains(uid));
        let frozen = pods.iter().map(|pod| &pod["metadata"]).filter(is_frozen);
        frozen.filter_map(|it| it["name"].as_str().map(str::to_owned)).collect()
    }

    /// Waits until a service has exactly `count` pods, all of them frozen, and returns their names.
    pub fn wait_frozen(&self, service: &str, count: usize) -> BTreeSet<String> {
        let select_all_frozen = |pods: &[Value]| {
            let frozen = self.select_frozen(pods);
            (frozen.len() == count && pods.len() == count).then_some(frozen)
        };
        wait_for(&format!("service {service} to have {count} frozen pods and no other one"), || {
            select_all_frozen(&self.stored_pods(service))?;
            select_all_frozen(&self.pods(service))
        })
    }

    /// Waits as [`wait_frozen`](Self::wait_frozen), without the command of users: pods that are frozen for seconds only
    /// may be thawed before it has started.
    pub fn wait_briefly_frozen(&self, service: &str, count: usize) -> BTreeSet<String> {
        wait_for(&format!("service {service} to have {count} frozen pods for a moment"), || {
            let pods = self.stored_pods(service);
            let frozen = self.select_frozen(&pods);
            (frozen.len() == count && pods.len() == count).then_some(frozen)
        })
    }

    /// Log of `rouse up` so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Metrics of a component, read from its admin port in the node's namespace.
    pub fn metrics(&self, port: u16) -> String {
        thread::scope(|scope| {
            let fetch = || {
                let namespace =
                    net::open_namespace(&self.layout.node_namespace()).expect("a namespace");
                net::enter_namespace(namespace.as_fd()).expect("root");
                crate::http_client::get(
                    SocketAddr::from(([127, 0, 0, 1], port)),
                    "localhost",
                    "/metrics",
                )
            };
            scope.spawn(fetch).join().expect("metrics").expect("a response").body
        })
    }

    /// Ends the node as a user does. Returns true if `up` ended with success.
    fn stop(&mut self) -> bool {
        // `down` kills all processes in the clients' cgroup, so this process leaves it first.
        let has_left = fs::write(self.original_cgroup.join("cgroup.procs"), "0");
        let result = self.try_run(&["down", "--purge"]);
        let status = self.process.wait();
        has_left.is_ok() && result.status.success() && status.is_ok_and(|status| status.success())
    }
}

impl Drop for RouseNode {
    #[allow(clippy::print_stdout, reason = "libtest shows it with the test that failed")]
    fn drop(&mut self) {
        let ended = self.stop();
        if thread::panicking() {
            println!("the node's log:\n{}", self.log());
        } else {
            assert!(ended, "the node did not end well:\n{}", self.log());
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn required_variable(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set: run `cargo xtask test --tier local`"))
}

/// Directory of the cgroup v2 of this process.
fn own_cgroup() -> PathBuf {
    let text = fs::read_to_string("/proc/self/cgroup").expect("/proc");
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).expect("cgroup v2");
    let mounts = CgroupMounts::find().expect("cgroup v2");
    mounts.v2.join(Path::new(path).strip_prefix("/").expect("an absolute path"))
}
