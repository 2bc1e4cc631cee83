//! Shell: a pod with a server in it, a client beside it, and the commands that start them.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    BACKEND_PORTS,
    results_table::{self, ServerRow},
    server_counts::{RequestCount, ServerCountSource},
};
use crate::fixture::{NetnsFixture, SERVING_PORT, SharedKernelFixture, command_in};

/// Directory of the programs in other languages.
pub(super) const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/servers");
/// Timeout of every wait. On a busy machine the start of a Java program alone takes half a minute.
const WAIT_TIMEOUT: Duration = Duration::from_secs(240);
/// Request bodies: name of the file, first bytes, and number of further bytes.
const REQUEST_BODIES: [(&str, &[u8], usize); 6] = [
    ("50k", b"", 50_000),
    ("200k", b"", 200_000),
    ("2m", b"", 2_000_000),
    // gRPC messages: not compressed, length, field 1, length.
    ("grpc-hello", b"\0\0\0\0\x07\x0a\x05hello", 0),
    ("grpc-wait", b"\0\0\0\0\x06\x0a\x04wait", 0),
    ("grpc-fail", b"\0\0\0\0\x06\x0a\x04fail", 0),
];

/// Command of a server, and the source of its own count.
pub(super) struct ServerRecipe {
    pub(super) words: Vec<String>,
    pub(super) count_source: ServerCountSource,
}

pub(super) struct ServerFixture {
    pub(super) server: &'static str,
    /// Dropped before `kernel`, whose drop also kills the children of the servers.
    running: RunningServers,
    pub(super) kernel: SharedKernelFixture,
    pub(super) pod: NetnsFixture,
    pub(super) client: NetnsFixture,
    pub(super) folder: TempFolder,
    count_source: Option<ServerCountSource>,
    pub(super) rows: Vec<ServerRow>,
    pub(super) failures: Vec<String>,
}

/// Running servers, killed on drop.
#[derive(Default)]
struct RunningServers(Vec<Child>);

impl Drop for RunningServers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _dead_already = child.kill();
            let _waited_already = child.wait();
        }
    }
}

/// Directory of one fixture, removed on drop.
pub(super) struct TempFolder(pub(super) PathBuf);

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _none = fs::remove_dir_all(&self.0);
    }
}

impl ServerFixture {
    pub(super) fn new(server: &'static str) -> Self {
        let mut kernel = SharedKernelFixture::new();
        let (pod, client) = (kernel.add_pod(), kernel.add_client());
        kernel.register_pod(&pod, 0);
        let folder = TempFolder(std::env::temp_dir().join(format!("{}-servers", pod.netns)));
        fs::create_dir_all(&folder.0).unwrap();
        for (name, begin, size) in REQUEST_BODIES {
            let rest = vec![b'x'; size];
            fs::write(folder.0.join(name), [begin, rest.as_slice()].concat()).unwrap();
        }
        Self {
            server,
            running: RunningServers::default(),
            kernel,
            pod,
            client,
            folder,
            count_source: None,
            rows: vec![],
            failures: vec![],
        }
    }

    /// Path of a file in the fixture's folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    /// Path of the file in which the applications record the begin and end of each request.
    pub(super) fn request_record(&self) -> PathBuf {
        self.path("book")
    }

    /// Recipe of a server in Go.
    pub(super) fn go(&self, role: &str) -> ServerRecipe {
        self.with_request_record(vec![built_program("servers"), role.into()])
    }

    /// Recipe of a server in Rust.
    pub(super) fn rust(&self, role: &str) -> ServerRecipe {
        self.with_request_record(vec![env!("CARGO_BIN_EXE_servers").into(), role.into()])
    }

    pub(super) fn node(&self, role: &str) -> ServerRecipe {
        self.with_request_record(["node", "app.mjs", role].map(str::to_owned).to_vec())
    }

    pub(super) fn python(&self, args: &[&str]) -> ServerRecipe {
        self.with_request_record(args.iter().map(|word| (*word).to_owned()).collect())
    }

    pub(super) fn java(&self, role: &str) -> ServerRecipe {
        self.with_request_record(java_words().chain([role.to_owned()]).collect())
    }

    fn with_request_record(&self, args: Vec<String>) -> ServerRecipe {
        let count_source = ServerCountSource::RequestRecord(self.request_record());
        ServerRecipe { words: args, count_source }
    }

    pub(super) fn go_client(&self, role: &str) -> String {
        format!("{} {role}", built_program("servers"))
    }

    pub(super) fn python_client(&self) -> String {
        format!("/usr/bin/python3 {SOURCES}/app.py websockets")
    }

    pub(super) fn java_client(&self, role: &str) -> String {
        java_words().chain([role.to_owned()]).collect::<Vec<_>>().join(" ")
    }

    pub(super) fn grpcurl(&self) -> String {
        built_program("grpcurl")
    }

    /// Starts the applications behind a proxy in the pod.
    pub(super) fn start_backends(&mut self) {
        for (role, port) in ["http", "grpc"].into_iter().zip(BACKEND_PORTS) {
            let mut command = self.netns_command(&self.pod, &[env!("CARGO_BIN_EXE_servers"), role]);
            command.env("ADDRESS", format!("127.0.0.1:{port}"));
            let child = self.spawn(&mut command, role);
            self.running.0.push(child);
            self.wait_for_listener(port, role);
        }
    }

    /// Starts the server of a recipe, and waits until it listens.
    pub(super) fn start(&mut self, recipe: &ServerRecipe) {
        let args: Vec<&str> = recipe.words.iter().map(String::as_str).collect();
        let mut command = self.netns_command(&self.pod, &args);
        command
            .env("PORT", SERVING_PORT.to_string())
            .env("ADDRESS", format!("0.0.0.0:{SERVING_PORT}"));
        let child = self.spawn(&mut command, "server");
        self.running.0.push(child);
        self.wait_for_listener(SERVING_PORT, "server");
        self.count_source = Some(recipe.count_source.clone());
    }

    /// Command in the network namespace and cgroup of `netns`.
    pub(super) fn netns_command(&self, netns: &NetnsFixture, args: &[&str]) -> Command {
        let mut command = command_in(&netns.cgroup, &netns.netns);
        command.args(args).current_dir(SOURCES);
        command.env("BOOK", self.request_record()).env("GATE", self.path("gate"));
        // Python must leave no files in the repository.
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// Starts a command with its output in a file.
    pub(super) fn spawn(&self, command: &mut Command, log: &str) -> Child {
        let out = File::create(self.path(&format!("{log}.out"))).unwrap();
        command.stdout(out.try_clone().unwrap()).stderr(out).stdin(Stdio::piped());
        command.spawn().unwrap()
    }

    pub(super) fn output(&self, log: &str) -> String {
        let text = fs::read(self.path(&format!("{log}.out"))).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }

    fn wait_for_listener(&self, port: u16, log: &str) {
        let listens = || {
            let mut ss = Command::new("ip");
            let port = format!(":{port}");
            ss.args(["netns", "exec", &self.pod.netns, "ss", "-Hltn", "sport", "=", &port]);
            !ss.output().expect("`ss` is installed (iproute2)").stdout.is_empty()
        };
        let is_listening = poll_until(listens);
        assert!(is_listening, "{} does not listen on {port}: {}", self.server, self.output(log));
    }

    pub(super) fn server_count(&self) -> RequestCount {
        self.count_source.as_ref().expect("it was started").read()
    }

    pub(super) fn kernel_count(&self) -> RequestCount {
        let totals = self.kernel.maps.totals(u32::from(self.pod.number));
        RequestCount { begun: totals.started, ended: totals.finished }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.kernel.maps.pod_state(u32::from(self.pod.number)).in_flight
    }

    /// Difference between counted and real connections. A server may well keep one whose client has gone.
    pub(super) fn connection_difference(&self) -> u64 {
        let counted = self.kernel.maps.pod_state(u32::from(self.pod.number)).connections;
        counted.abs_diff(open_connections(&self.pod.netns))
    }

    pub(super) fn cut_responses(&self) -> u64 {
        self.kernel.maps.responses(u32::from(self.pod.number)).aborted
    }

    /// Prints the rows, and fails if any of them has a difference.
    pub(super) fn finish(self) {
        results_table::print_and_save(&self.rows);
        // A server may be closing connections: the kernel counts one a moment sooner or later than `ss` lists it.
        poll_until(|| self.rest_state() == [0; 5]);
        let state = self.kernel.maps.pod_state(u32::from(self.pod.number));
        assert!(
            self.failures.is_empty(),
            "{}\n{state:?}\n{}",
            self.failures.join("\n"),
            self.output("server")
        );
        let listed = list_connections(&self.pod.netns);
        assert_eq!(self.rest_state(), [0; 5], "{state:?}, and by `ss`:\n{listed}");
    }

    /// State of the pod that should be zero at rest.
    ///
    /// Without `stray_responses`: servers also respond to incomplete requests, Node and haproxy with 400 when a client
    /// breaks off.
    fn rest_state(&self) -> [u64; 5] {
        let state = self.kernel.maps.pod_state(u32::from(self.pod.number));
        [
            state.in_flight,
            self.connection_difference(),
            state.awaiting_first_request,
            state.desynced_connections,
            state.opaque_connections,
        ]
    }
}

/// Number of open connections at a namespace's serving port, in any state.
fn open_connections(netns: &str) -> u64 {
    list_connections(netns).lines().count() as u64
}

/// Lists the open connections at a namespace's serving port, in any state.
fn list_connections(netns: &str) -> String {
    let args = "ss -Hatn exclude listening exclude time-wait exclude syn-recv sport = :8080";
    let mut ss = Command::new("ip");
    ss.args(["netns", "exec", netns]).args(args.split(' '));
    let output = ss.output().expect("`ss` is installed (iproute2)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until `is_done` returns true. Returns false after the timeout.
pub(super) fn poll_until(mut is_done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !is_done() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Path of a program that `cargo xtask servers` has built.
pub(super) fn built_program(name: &str) -> String {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a directory in target/");
    let folder =
        std::env::var_os("ROUSE_SERVERS").map_or_else(|| target.join("servers"), PathBuf::from);
    let file = folder.join(name);
    assert!(file.exists(), "there is no {}: run `cargo xtask servers`", file.display());
    file.display().to_string()
}

/// Arguments that run the Java class of the tests.
fn java_words() -> impl Iterator<Item = String> {
    let jars =
        fs::read_to_string(Path::new(&built_program("java")).join("jars")).expect("built with it");
    let classes = format!("{}:{}", built_program("java"), jars.trim());
    // Options for a fast start and a small heap.
    let options = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-cp"];
    options.map(str::to_owned).into_iter().chain([classes, "App".to_owned()])
}
