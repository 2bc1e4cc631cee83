//! Shell: a node of one test: network namespaces on a bridge, cgroups, a bpf filesystem, and the attached programs.
//!
//! All names contain this process' id. A fixture is removed on drop, also by a panic; leftovers of killed runs are
//! removed when the next fixture is made.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::UdpSocket,
    ops::{Deref, DerefMut},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, MutexGuard, Once, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use agent::{
    config::ClusterIpMode,
    kernel::{
        features::VerifierFeatures,
        locked_close::LockedCloser,
        map_op::KernelPodIds,
        maps::KernelMaps,
        netns_cookies::NetnsCookies,
        pod_registration::PodRegistration,
        programs::{self, EbpfPrograms},
    },
    map_sizes::MapSizes,
    paths::AgentPaths,
    routes::plan::{ClusterChange, RoutePlanner},
};
use common::{
    fixtures,
    wire::{
        ActivatorEntry, ConnectionPath, NamespacedName, PodEntry, RouteTable, RoutingPhase,
        ServiceEntry,
    },
};
use datapath::abi;
use nix::sched::{CloneFlags, setns};

use crate::{scripted_process::ScriptedProcess, sys};

/// Beginning of the names of all objects of a fixture.
const PREFIX: &str = "rouse_kernel-";
/// Port on which the pods serve.
pub(crate) const SERVING_PORT: u16 = 8080;

/// Function that ends an agent which no test uses at the moment, so that it does not run beside all later tests. It is
/// set by the first test that leaves one.
pub(crate) static BEFORE_LOAD: OnceLock<fn()> = OnceLock::new();

pub(crate) struct KernelFixture {
    name: String,
    paths: AgentPaths,
    pub(crate) programs: Option<EbpfPrograms>,
    /// Closer of connections; `None` on kernels without support.
    pub(crate) locked_closer: Option<LockedCloser>,
    pub(crate) maps: KernelMaps,
    pub(crate) table: RouteTable,
    /// RouteTable as last passed to the planner.
    planned_table: RouteTable,
    pub(crate) pod_ids: BTreeMap<String, KernelPodIds>,
    planner: RoutePlanner,
    now_ns: u64,
    /// Number of the newest network namespace.
    last_netns: u8,
    /// Number of the last network namespace that was removed; earlier ones are removed as well.
    last_removed_netns: u8,
}

/// A network namespace on the bridge with a cgroup of its own.
pub(crate) struct NetnsFixture {
    pub(crate) netns: String,
    pub(crate) cgroup: PathBuf,
    pub(crate) number: u8,
    pub(crate) cookie: u64,
}

/// Command for this cgroup and network namespace; program and arguments are to be appended.
pub(crate) fn command_in(cgroup: &Path, netns: &str) -> Command {
    let script = "echo $$ > \"$1\" && shift && exec ip netns exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(cgroup.join("cgroup.procs")).arg(netns);
    command
}

/// Fixture that tests use one after the other. Loading takes longer than most of them, and on a node the programs also
/// outlive many pods. Each test has namespaces of its own, whose numbers are never used again.
///
/// For tests that inspect only objects of their own namespaces, changes of counters, and gauges that are 0 at rest. A
/// test may load the same programs again, and change lists in the maps. It must not fill maps, or replace programs or
/// maps by others: such a test has a fixture alone.
pub(crate) struct SharedKernelFixture {
    fixture: Option<KernelFixture>,
    /// True if one test alone uses this fixture.
    is_exclusive: bool,
}

/// The fixture that no test uses at the moment.
static IDLE_FIXTURE: Mutex<Option<KernelFixture>> = Mutex::new(None);
/// Highest number of a network namespace in a fixture that is used again: the number is the last part of the address.
const MAX_NETNS: u8 = 200;

impl SharedKernelFixture {
    pub(crate) fn new() -> Self {
        let idle = lock_idle_fixture().take();
        Self { fixture: Some(idle.unwrap_or_else(KernelFixture::new)), is_exclusive: false }
    }

    /// Creates a fixture for one test alone, which leaves changes behind.
    pub(crate) fn exclusive() -> Self {
        Self::of_one_test(KernelFixture::new())
    }

    /// Makes this fixture one for a test alone, which leaves changes behind.
    pub(crate) fn of_one_test(fixture: KernelFixture) -> Self {
        Self { fixture: Some(fixture), is_exclusive: true }
    }
}

impl Deref for SharedKernelFixture {
    type Target = KernelFixture;

    fn deref(&self) -> &KernelFixture {
        self.fixture.as_ref().expect("taken by drop alone")
    }
}

impl DerefMut for SharedKernelFixture {
    fn deref_mut(&mut self) -> &mut KernelFixture {
        self.fixture.as_mut().expect("taken by drop alone")
    }
}

impl Drop for SharedKernelFixture {
    fn drop(&mut self) {
        static AT_EXIT: Once = Once::new();
        let Some(mut fixture) = self.fixture.take() else { return };
        // After a failure the next test gets a new fixture.
        if self.is_exclusive || std::thread::panicking() || fixture.last_netns > MAX_NETNS {
            return;
        }
        let pins = fixture.programs.as_ref().map(EbpfPrograms::pins);
        let own_pins = Some(fixture.paths.pins());
        assert_eq!(pins, own_pins, "a test that replaces programs needs a fixture alone");
        fixture.remove_all();
        AT_EXIT.call_once(|| sys::at_exit(|| drop(lock_idle_fixture().take())));
        *lock_idle_fixture() = Some(fixture);
    }
}

fn lock_idle_fixture() -> MutexGuard<'static, Option<KernelFixture>> {
    IDLE_FIXTURE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NetnsFixture {
    pub(crate) fn start_process(&self) -> ScriptedProcess {
        ScriptedProcess::start(&self.cgroup, &self.netns)
    }

    pub(crate) fn ipv4(&self) -> String {
        format!("10.99.0.{}", self.number)
    }

    pub(crate) fn ipv6(&self) -> String {
        format!("fd99::{:x}", self.number)
    }
}

impl KernelFixture {
    /// Makes a fixture. In a build without the eBPF programs it fails with the command that builds them.
    pub(crate) fn new() -> Self {
        Self::with_programs(EbpfPrograms::load)
    }

    /// Makes a fixture whose programs are loaded by `load`.
    pub(crate) fn with_programs(
        load: impl FnOnce(AgentPaths) -> Result<EbpfPrograms, programs::EbpfProgramsError>,
    ) -> Self {
        if let Some(end_idle_agent) = BEFORE_LOAD.get() {
            end_idle_agent();
        }
        let (paths, guard) = create_cgroups();
        let name = guard.0.clone();
        create_node(&name);
        let fixture = Self::load(name, paths, load);
        std::mem::forget(guard);
        fixture
    }

    /// Makes a fixture whose programs use only these features of the kernel.
    pub(crate) fn with_features(features: VerifierFeatures) -> Self {
        Self::with_programs(|paths| {
            EbpfPrograms::load_with(programs::embedded_object(), paths, features)
        })
    }

    /// Loads a second set of programs with tables of its own, attached to the cgroup above this fixture's.
    pub(crate) fn load_beside(&self) -> Self {
        let name = format!("{}x", self.name);
        let above = cgroup2_mount().join(&self.name);
        let bpffs = folder(&name).join("bpf");
        let (clients, pods) = (above.clone(), above);
        Self::load(
            name,
            AgentPaths { bpffs, clients, pods, ..self.paths.clone() },
            EbpfPrograms::load,
        )
    }

    fn load(
        name: String,
        paths: AgentPaths,
        load: impl FnOnce(AgentPaths) -> Result<EbpfPrograms, programs::EbpfProgramsError>,
    ) -> Self {
        let mut programs =
            load(paths.clone()).unwrap_or_else(|error| panic!("{}", error_chain(&error)));
        let locked_closer = programs.take_locked_closer();
        let maps = KernelMaps::open(&programs.pins()).expect("the maps are pinned");
        let planner = RoutePlanner::resume(maps.read_routes().expect("readable"), 0);
        Self {
            name,
            paths,
            programs: Some(programs),
            locked_closer,
            maps,
            table: RouteTable::default(),
            planned_table: RouteTable::default(),
            pod_ids: BTreeMap::new(),
            planner,
            now_ns: abi::QUARANTINE_NS,
            last_netns: 1,
            last_removed_netns: 1,
        }
    }

    /// Name of the node's own network namespace.
    pub(crate) fn node_netns(&self) -> String {
        format!("{}-node", self.name)
    }

    /// Writes the node's own addresses to the maps.
    pub(crate) fn write_node_addresses(&mut self) {
        let addresses = ["::ffff:10.99.0.1", "fd99::1"].map(|ip| {
            let ip: std::net::Ipv6Addr = ip.parse().expect("an address");
            ip.octets()
        });
        self.maps.set_node_addresses(&addresses.into()).expect("room");
    }

    pub(crate) fn paths(&self) -> &AgentPaths {
        &self.paths
    }

    /// Removes the cgroups, which must hold no process, and creates them again.
    pub(crate) fn recreate_cgroups(&self) {
        remove_cgroup(&self.paths.clients);
        assert!(!self.paths.clients.exists(), "nothing may run there");
        fs::create_dir_all(&self.paths.pods).expect("root may make cgroups");
    }

    /// Creates a network namespace and a cgroup for a client.
    pub(crate) fn add_client(&mut self) -> NetnsFixture {
        self.add_netns("clients/client")
    }

    /// Creates a network namespace and a cgroup for a pod, without registering the pod.
    pub(crate) fn add_pod(&mut self) -> NetnsFixture {
        self.add_netns("pods/pod")
    }

    /// Registers a pod in the row of its number. Of the flags, those about binds and about its serving port count.
    pub(crate) fn register_pod(&mut self, pod: &NetnsFixture, flags: u16) {
        self.register_pod_with_ports(pod, flags, &[]);
    }

    /// Registers a pod with further ports, each with true if its connections count as requests.
    pub(crate) fn register_pod_with_ports(
        &mut self,
        pod: &NetnsFixture,
        flags: u16,
        ports: &[(u16, bool)],
    ) {
        let registration = registration(pod, flags, ports);
        self.maps.clear_slot(registration.slot);
        self.maps.register_pod(pod.cookie, &registration).expect("room");
        let (cookie, slot) = (pod.cookie, registration.slot);
        let ids = KernelPodIds { cookie, slot, ..KernelPodIds::default() };
        self.pod_ids.insert(pod_uid(pod), ids);
    }

    /// Removes all services, node addresses and network namespaces, with their processes.
    fn remove_all(&mut self) {
        self.table = RouteTable::default();
        // Another planner knows no Services of the cluster, and finds in the maps what the test itself has written.
        let routes = self.maps.read_routes().expect("readable");
        self.planner = RoutePlanner::resume(routes, self.now_ns);
        self.planned_table = RouteTable::default();
        self.apply_table();
        self.maps.set_node_addresses(&BTreeSet::new()).expect("writable");
        for KernelPodIds { cookie, .. } in std::mem::take(&mut self.pod_ids).into_values() {
            self.maps.unregister(cookie).expect("it was registered");
        }
        for folder in [self.paths.pods.clone(), self.paths.clients.join("clients")] {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.filter(|it| it.path().is_dir()).for_each(|it| remove_cgroup(&it.path()));
        }
        for number in self.last_removed_netns..self.last_netns {
            remove_netns(&format!("{}-{}", self.name, number + 1));
        }
        self.last_removed_netns = self.last_netns;
    }

    /// Adds a service at 10.96.0.`number` and fd96::`number`, port 80, for pods of a revision of its own.
    pub(crate) fn add_service(&mut self, number: u8, connection_path: ConnectionPath) {
        let service = ServiceEntry {
            addresses: vec![
                format!("10.96.0.{number}").parse().expect("an address"),
                format!("fd96::{number:x}").parse().expect("an address"),
            ],
            port: 80.try_into().expect("not 0"),
            activator_port: (20_000 + u16::from(number)).try_into().expect("not 0"),
            connection_path,
            ..fixtures::service(&name_of(number), &name_of(number))
        };
        self.table.services.insert(service.name.clone(), service);
    }

    /// Adds a ready pod to a service, with its IPv4 address.
    pub(crate) fn add_ready_pod(&mut self, pod: &NetnsFixture, service: u8) {
        self.set_pod(pod, service, RoutingPhase::Ready, pod.ipv4());
    }

    pub(crate) fn set_pod(
        &mut self,
        pod: &NetnsFixture,
        service: u8,
        phase: RoutingPhase,
        address: String,
    ) {
        let address = std::net::SocketAddr::new(address.parse().expect("an address"), SERVING_PORT);
        let pod = PodEntry {
            node: "here".into(),
            ..fixtures::pod_at(&pod_uid(pod), &name_of(service), phase, address)
        };
        self.table.pods.insert(pod.uid.clone(), pod);
    }

    pub(crate) fn add_activator(&mut self, netns: &NetnsFixture) {
        let addresses = vec![
            netns.ipv4().parse().expect("an address"),
            netns.ipv6().parse().expect("an address"),
        ];
        let activator =
            ActivatorEntry { node: "here".into(), ..fixtures::activator(&netns.ipv4(), addresses) };
        self.table.activators.insert(netns.ipv4(), activator);
    }

    /// Continues with other maps, whose content the planner reads again.
    pub(crate) fn continue_with_maps(&mut self, maps: KernelMaps) {
        self.planner = RoutePlanner::resume(maps.read_routes().expect("readable"), self.now_ns);
        self.maps = maps;
        self.planned_table = RouteTable::default();
    }

    /// Puts the table in force, one quarantine later than the last one. Returns the number of map operations.
    pub(crate) fn apply_table(&mut self) -> usize {
        self.now_ns += abi::QUARANTINE_NS;
        let changes = self.planned_table.changes_to(&self.table);
        changes.into_iter().for_each(|change| self.planner.apply_change(change));
        self.planned_table = self.table.clone();
        self.planned_table.pods.keys().for_each(|uid| self.planner.mark_pod_changed(uid));
        let ops = self.planner.plan(self.now_ns, &self.pod_ids).expect("it fits").ops;
        self.maps.apply(&ops).expect("writable");
        ops.len()
    }

    /// Makes this fixture's node serve Services of the cluster.
    pub(crate) fn serve_cluster_services(&mut self, mode: ClusterIpMode) {
        self.planner.serve_cluster_services(mode, "here");
    }

    /// Applies observations of the cluster, and puts them in force. Returns the number of map operations.
    pub(crate) fn observe_cluster(&mut self, changes: Vec<ClusterChange>) -> usize {
        self.planner.apply_cluster_changes(changes);
        self.apply_table()
    }

    fn add_netns(&mut self, name: &str) -> NetnsFixture {
        self.last_netns += 1;
        let number = self.last_netns;
        let cgroup = self.paths.clients.join(format!("{name}{number}"));
        fs::create_dir_all(&cgroup).expect("root may make cgroups");
        let netns = format!("{}-{number}", self.name);
        let node = format!("{}-node", self.name);
        let veth = format!("v{number}");
        add_netns(&netns);
        run_ip(&[
            "-n", &node, "link", "add", &veth, "type", "veth", "peer", "name", "eth0", "netns",
            &netns,
        ]);
        run_ip(&["-n", &node, "link", "set", &veth, "master", "br0", "up"]);
        run_ip(&["-n", &netns, "link", "set", "lo", "up"]);
        run_ip(&["-n", &netns, "addr", "add", &format!("10.99.0.{number}/16"), "dev", "eth0"]);
        run_ip(&[
            "-n",
            &netns,
            "addr",
            "add",
            &format!("fd99::{number:x}/64"),
            "dev",
            "eth0",
            // Without the check for duplicates, which would keep the address unusable for a second.
            "nodad",
        ]);
        run_ip(&["-n", &netns, "link", "set", "eth0", "up"]);
        run_ip(&["-n", &netns, "route", "add", "default", "via", "10.99.0.1"]);
        run_ip(&["-n", &netns, "route", "add", "default", "via", "fd99::1"]);
        let cookie = netns_cookie(&netns, &NetnsCookies::new(&self.paths));
        NetnsFixture { netns, cgroup, number, cookie }
    }
}

impl Drop for KernelFixture {
    fn drop(&mut self) {
        drop(self.programs.take());
        remove_fixture(&self.name);
    }
}

/// Cgroups of a node, without namespaces and programs.
pub(crate) fn create_cgroups() -> (AgentPaths, FixtureCleanup) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    remove_leftovers();
    let name = format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    // The node's cgroup is below another one, to which tests may attach foreign programs.
    let clients = cgroup2_mount().join(&name).join("node");
    let paths = AgentPaths {
        bpffs: folder(&name).join("bpf"),
        pods: clients.join("pods"),
        clients,
        kubelet: None,
        version: abi::ABI_VERSION,
        map_sizes: MapSizes::default(),
    };
    let guard = FixtureCleanup(name);
    for cgroup in [paths.pods.clone(), paths.clients.join("clients")] {
        fs::create_dir_all(&cgroup).expect("root may make cgroups");
    }
    (paths, guard)
}

/// Guard that removes an incomplete fixture.
pub(crate) struct FixtureCleanup(String);

impl Drop for FixtureCleanup {
    fn drop(&mut self) {
        remove_fixture(&self.0);
    }
}

fn create_node(name: &str) {
    let node = format!("{name}-node");
    add_netns(&node);
    run_ip(&["-n", &node, "link", "set", "lo", "up"]);
    run_ip(&["-n", &node, "link", "add", "br0", "type", "bridge"]);
    run_ip(&["-n", &node, "addr", "add", "10.99.0.1/16", "dev", "br0"]);
    run_ip(&["-n", &node, "addr", "add", "fd99::1/64", "dev", "br0", "nodad"]);
    run_ip(&["-n", &node, "link", "set", "br0", "up"]);
    // An address that no program translates is refused at once instead of timing out.
    let sysctl = ["netns", "exec", &node, "sysctl", "-qw"];
    run_ip(&[&sysctl[..], &["net.ipv4.ip_forward=1"]].concat());
    run_ip(&[&sysctl[..], &["net.ipv6.conf.all.forwarding=1"]].concat());
    // Otherwise not each of these answers would be sent: a client then asks again seconds later.
    run_ip(&[&sysctl[..], &["net.ipv4.icmp_ratelimit=0"]].concat());
    run_ip(&[&sysctl[..], &["net.ipv6.icmp.ratelimit=0"]].concat());
    run_ip(&["-n", &node, "route", "add", "unreachable", "10.96.0.0/16"]);
    run_ip(&["-n", &node, "route", "add", "unreachable", "fd96::/64"]);
}

pub(crate) fn run_ip(args: &[&str]) {
    let output = Command::new("ip").args(args).output().expect("`ip` is installed (iproute2)");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "`ip {}` failed: {stderr}", args.join(" "));
}

/// Creates a network namespace with a small connection table of its own, where the kernel has such tables (6.1).
///
/// Otherwise each list of its connections would walk the table of the whole machine: milliseconds, in which a test mostly
/// waits for others.
pub(crate) fn add_netns(name: &str) {
    // The setting counts for namespaces that are made from the one in which it is written.
    let script = "file=/proc/sys/net/ipv4/tcp_child_ehash_entries
        [ ! -e $file ] || echo 16384 > $file
        exec ip netns add \"$1\"";
    let status = Command::new("unshare").args(["--net", "sh", "-ec", script, "sh", name]).status();
    assert!(status.expect("`unshare` is installed (util-linux)").success(), "namespace {name}");
}

/// Moves the calling thread into a network namespace, permanently.
pub(crate) fn enter_netns(netns: &str) {
    let namespace =
        fs::File::open(Path::new("/run/netns").join(netns)).expect("the fixture created it");
    setns(namespace, CloneFlags::CLONE_NEWNET).expect("root may enter it");
}

/// Runs `job` on a thread inside the namespace.
pub(crate) fn in_netns<T: Send>(netns: &str, job: impl FnOnce() -> T + Send) -> T {
    let result = std::thread::scope(|scope| {
        let run = || {
            enter_netns(netns);
            job()
        };
        scope.spawn(run).join()
    });
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Returns the errno of a TCP connect that the programs refuse.
pub(crate) fn tcp_refusal_errno() -> i32 {
    refusal_errno(VerifierFeatures::detect().refuses_tcp_with_econnrefused())
}

/// Returns the errno of a connect or datagram of UDP that the programs refuse.
pub(crate) fn udp_refusal_errno() -> i32 {
    refusal_errno(VerifierFeatures::detect().set_retval)
}

fn refusal_errno(is_econnrefused: bool) -> i32 {
    const EPERM: i32 = 1;
    const ECONNREFUSED: i32 = 111;
    if is_econnrefused { ECONNREFUSED } else { EPERM }
}

fn netns_cookie(netns: &str, cookies: &NetnsCookies) -> u64 {
    let namespace = fs::File::open(Path::new("/run/netns").join(netns)).expect("`ip` made it");
    in_netns(netns, || {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        cookies.cookie_of(&socket, namespace.as_fd()).expect("the programs are in force")
    })
}

/// Mount point of cgroup v2, also on machines with v1 and v2.
fn cgroup2_mount() -> PathBuf {
    let unified = PathBuf::from("/sys/fs/cgroup/unified");
    if unified.join("cgroup.procs").exists() { unified } else { PathBuf::from("/sys/fs/cgroup") }
}

fn folder(name: &str) -> PathBuf {
    Path::new("/run").join(name)
}

fn name_of(number: u8) -> NamespacedName {
    NamespacedName::new("default", format!("s{number}"))
}

/// Returns the registration of a pod in the row of its number.
pub(crate) fn registration(
    pod: &NetnsFixture,
    flags: u16,
    ports: &[(u16, bool)],
) -> PodRegistration {
    PodRegistration {
        slot: u32::from(pod.number),
        port: SERVING_PORT,
        keeps_binds: flags & abi::POD_WIDEN_BIND == 0,
        is_opaque: flags & abi::POD_OPAQUE != 0,
        ports: ports.to_vec(),
    }
}

pub(crate) fn pod_uid(pod: &NetnsFixture) -> String {
    format!("uid{}", pod.number)
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// Removes the leftovers of killed runs, whose process ids are in the names.
fn remove_leftovers() {
    let folders = [cgroup2_mount(), PathBuf::from("/run"), PathBuf::from("/run/netns")];
    let names =
        folders.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        let Some((pid, rest)) = rest.split_once('-') else { continue };
        let number = rest.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(pid).exists() {
            remove_fixture(&format!("{PREFIX}{pid}-{number}"));
        }
    }
}

fn remove_fixture(name: &str) {
    let paths = AgentPaths {
        bpffs: folder(name).join("bpf"),
        clients: cgroup2_mount().join(name),
        pods: cgroup2_mount().join(name).join("pods"),
        kubelet: None,
        version: abi::ABI_VERSION,
        map_sizes: MapSizes::default(),
    };
    let _none = programs::remove_pins(&paths.bpffs);
    let _not_mounted = nix::mount::umount(&paths.bpffs);
    let _none = fs::remove_dir_all(folder(name));
    remove_cgroup(&paths.clients);
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let netns = entry.file_name().to_string_lossy().into_owned();
        if netns.strip_prefix(name).is_some_and(|rest| rest.starts_with('-')) {
            remove_netns(&netns);
        }
    }
}

fn remove_netns(netns: &str) {
    let _gone = Command::new("ip").args(["netns", "del", netns]).output();
}

fn remove_cgroup(cgroup: &Path) {
    for entry in fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    // `cgroup.kill` exists since 5.14; on older kernels only dropping the scripted processes ends them.
    let _older_kernel = fs::write(cgroup.join("cgroup.kill"), "1");
    for _ in 0..2_000 {
        if fs::remove_dir(cgroup).is_ok() || !cgroup.exists() {
            return;
        }
        #[allow(
            clippy::disallowed_methods,
            reason = "no runtime here; killed processes leave in their time"
        )]
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
