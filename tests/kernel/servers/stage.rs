//! Shell: a pod with a server in it, a client beside it, and the commands that start them.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    BEHIND,
    own::{RequestCount, ServerCountSource},
    table::{self, ServerRow},
};
use crate::bed::{NetnsFixture, SERVING, SharedKernelFixture, command_in};

/// Directory of the programs in other languages.
pub(super) const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/servers");
/// Timeout of every wait.
const PATIENCE: Duration = Duration::from_secs(20);
/// Request bodies: name of the file, first bytes, and number of further bytes.
const FILES: [(&str, &[u8], usize); 6] = [
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
    pub(super) own: ServerCountSource,
}

pub(super) struct ServerFixture {
    pub(super) server: &'static str,
    /// Dropped before the bed, which also kills the children of the servers.
    running: RunningServers,
    pub(super) bed: SharedKernelFixture,
    pub(super) pod: NetnsFixture,
    pub(super) client: NetnsFixture,
    pub(super) folder: TempFolder,
    own: Option<ServerCountSource>,
    pub(super) rows: Vec<ServerRow>,
    pub(super) wrong: Vec<String>,
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

/// Directory of one stage, removed on drop.
pub(super) struct TempFolder(pub(super) PathBuf);

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _none = fs::remove_dir_all(&self.0);
    }
}

impl ServerFixture {
    pub(super) fn new(server: &'static str) -> Self {
        let mut bed = SharedKernelFixture::new();
        let (pod, client) = (bed.pod(), bed.client());
        bed.register(&pod, 0);
        let folder = TempFolder(std::env::temp_dir().join(format!("{}-servers", pod.netns)));
        fs::create_dir_all(&folder.0).unwrap();
        for (name, begin, size) in FILES {
            let rest = vec![b'x'; size];
            fs::write(folder.0.join(name), [begin, rest.as_slice()].concat()).unwrap();
        }
        Self {
            server,
            running: RunningServers::default(),
            bed,
            pod,
            client,
            folder,
            own: None,
            rows: vec![],
            wrong: vec![],
        }
    }

    /// Path of a file of this stage.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    /// Recipe of a server in Go.
    pub(super) fn go(&self, role: &str) -> ServerRecipe {
        self.booked(vec![built("servers"), role.into()])
    }

    /// Recipe of a server in Rust.
    pub(super) fn rust(&self, role: &str) -> ServerRecipe {
        self.booked(vec![env!("CARGO_BIN_EXE_servers").into(), role.into()])
    }

    pub(super) fn node(&self, role: &str) -> ServerRecipe {
        self.booked(["node", "app.mjs", role].map(str::to_owned).to_vec())
    }

    pub(super) fn python(&self, words: &[&str]) -> ServerRecipe {
        self.booked(words.iter().map(|word| (*word).to_owned()).collect())
    }

    pub(super) fn java(&self, role: &str) -> ServerRecipe {
        self.booked(java().chain([role.to_owned()]).collect())
    }

    fn booked(&self, words: Vec<String>) -> ServerRecipe {
        ServerRecipe { words, own: ServerCountSource::Book(self.file("book")) }
    }

    pub(super) fn go_client(&self, role: &str) -> String {
        format!("{} {role}", built("servers"))
    }

    pub(super) fn python_client(&self) -> String {
        format!("/usr/bin/python3 {SOURCES}/app.py websockets")
    }

    pub(super) fn java_client(&self, role: &str) -> String {
        java().chain([role.to_owned()]).collect::<Vec<_>>().join(" ")
    }

    pub(super) fn grpcurl(&self) -> String {
        built("grpcurl")
    }

    /// Starts the applications behind a proxy in the pod.
    pub(super) fn start_backends(&mut self) {
        for (role, port) in ["http", "grpc"].into_iter().zip(BEHIND) {
            let mut command = self.inside(&self.pod, &[env!("CARGO_BIN_EXE_servers"), role]);
            command.env("ADDRESS", format!("127.0.0.1:{port}"));
            let child = self.spawn(&mut command, role);
            self.running.0.push(child);
            self.wait_for_listener(port, role);
        }
    }

    /// Starts the server of a recipe, and waits until it listens.
    pub(super) fn start(&mut self, recipe: &ServerRecipe) {
        let words: Vec<&str> = recipe.words.iter().map(String::as_str).collect();
        let mut command = self.inside(&self.pod, &words);
        command.env("PORT", SERVING.to_string()).env("ADDRESS", format!("0.0.0.0:{SERVING}"));
        let child = self.spawn(&mut command, "server");
        self.running.0.push(child);
        self.wait_for_listener(SERVING, "server");
        self.own = Some(recipe.own.clone());
    }

    /// Command in a place's network namespace and cgroup.
    pub(super) fn inside(&self, place: &NetnsFixture, words: &[&str]) -> Command {
        let mut command = command_in(&place.cgroup, &place.netns);
        command.args(words).current_dir(SOURCES);
        command.env("BOOK", self.file("book")).env("GATE", self.file("gate"));
        // Python must leave no files in the repository.
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// Starts a command with its output in a file.
    pub(super) fn spawn(&self, command: &mut Command, log: &str) -> Child {
        let out = File::create(self.file(&format!("{log}.out"))).unwrap();
        command.stdout(out.try_clone().unwrap()).stderr(out).stdin(Stdio::piped());
        command.spawn().unwrap()
    }

    pub(super) fn printed(&self, log: &str) -> String {
        let text = fs::read(self.file(&format!("{log}.out"))).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }

    fn wait_for_listener(&self, port: u16, log: &str) {
        let listens = || {
            let mut ss = Command::new("ip");
            let port = format!(":{port}");
            ss.args(["netns", "exec", &self.pod.netns, "ss", "-Hltn", "sport", "=", &port]);
            !ss.output().expect("`ss` is installed (iproute2)").stdout.is_empty()
        };
        let so = until(listens);
        assert!(so, "{} does not listen on {port}: {}", self.server, self.printed(log));
    }

    pub(super) fn own(&self) -> RequestCount {
        self.own.as_ref().expect("it was started").count()
    }

    pub(super) fn kernel(&self) -> RequestCount {
        let totals = self.bed.maps.totals(u32::from(self.pod.number));
        RequestCount { begun: totals.started, ended: totals.finished }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.bed.maps.pod_state(u32::from(self.pod.number)).in_flight
    }

    /// Difference between counted and real connections. A server may well keep one whose client has gone.
    pub(super) fn surplus(&self) -> u64 {
        let counted = self.bed.maps.pod_state(u32::from(self.pod.number)).connections;
        counted.abs_diff(accepted(&self.pod.netns))
    }

    pub(super) fn cut(&self) -> u64 {
        self.bed.maps.responses(u32::from(self.pod.number)).aborted
    }

    /// Prints the rows, and fails if any of them has a difference.
    pub(super) fn finish(self) {
        table::show(&self.rows);
        // A server may be closing connections: the kernel counts one a moment sooner or later than `ss` lists it.
        until(|| self.rest() == [0; 5]);
        let state = self.bed.maps.pod_state(u32::from(self.pod.number));
        assert!(
            self.wrong.is_empty(),
            "{}\n{state:?}\n{}",
            self.wrong.join("\n"),
            self.printed("server")
        );
        assert_eq!(self.rest(), [0; 5], "{state:?}");
    }

    /// State of the pod that should be zero at rest.
    ///
    /// Without `stray`: servers also answer incomplete requests, Node and haproxy with 400 when a client breaks off.
    fn rest(&self) -> [u64; 5] {
        let state = self.bed.maps.pod_state(u32::from(self.pod.number));
        [
            state.in_flight,
            self.surplus(),
            state.awaiting_first_request,
            state.desynced_connections,
            state.opaque_connections,
        ]
    }
}

/// Number of open connections at a namespace's serving port, in any state.
fn accepted(netns: &str) -> u64 {
    let words = "ss -Hatn exclude listening exclude time-wait exclude syn-recv sport = :8080";
    let mut ss = Command::new("ip");
    ss.args(["netns", "exec", netns]).args(words.split(' '));
    let found = ss.output().expect("`ss` is installed (iproute2)");
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    String::from_utf8_lossy(&found.stdout).lines().count() as u64
}

/// Waits until `so` returns true. Returns false after the timeout.
pub(super) fn until(mut so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while !so() {
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Path of a program that `cargo xtask servers` has built.
fn built(name: &str) -> String {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it stands in target/");
    let folder =
        std::env::var_os("ROUSE_SERVERS").map_or_else(|| target.join("servers"), PathBuf::from);
    let file = folder.join(name);
    assert!(file.exists(), "there is no {}: run `cargo xtask servers`", file.display());
    file.display().to_string()
}

/// Arguments that run the Java class of the tests.
fn java() -> impl Iterator<Item = String> {
    let jars = fs::read_to_string(Path::new(&built("java")).join("jars")).expect("built with it");
    let classes = format!("{}:{}", built("java"), jars.trim());
    // Options for a fast start and a small heap.
    let options = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-cp"];
    options.map(str::to_owned).into_iter().chain([classes, "App".to_owned()])
}
