//! Connection pools of clients in five languages over a rollout, a rollback and the growth from one pod to four: the
//! traffic moves with the routes, and no request fails for clients that try again after a close of an idle connection.
//!
//! In the local tier, because connections are moved by the agent and the eBPF programs of the clients' node, and one
//! node has both.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
};

use tests::{
    rouse_node::RouseNode, test_cluster::required_variable, tls_client::client_script,
    wait::wait_for,
};

/// Connections in the pool of each client.
const WORKERS: &str = "8";
/// Requests of each client in a round.
const ROUND: usize = 200;

/// Client in a process of its own, whose pool lives from round to round.
struct PoolClient {
    name: &'static str,
    process: Child,
    /// `None` once the client was told to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// Result of a round: failed requests, and requests that each pod has served.
#[derive(Debug, Default)]
struct PoolRound {
    failed: usize,
    served: BTreeMap<String, usize>,
}

impl PoolClient {
    fn start(node: &RouseNode, name: &'static str, words: &[String], url: &str) -> Self {
        let mut process = node.in_client_netns(|| {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).args(["rounds", url, WORKERS]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client")
        });
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("it is piped"));
        Self { name, process, input, output }
    }

    /// Sends a round of requests, and waits for its result.
    fn request_round(&mut self) -> PoolRound {
        let input = self.input.as_mut().expect("the client has not ended");
        writeln!(input, "{ROUND}").expect("the client reads");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the client responds");
        parse_round(&line).unwrap_or_else(|| panic!("{}: {line:?}", self.name))
    }
}

impl Drop for PoolClient {
    fn drop(&mut self) {
        drop(self.input.take());
        // A client that hangs would keep the test from its end.
        let _ended = self.process.kill();
        let _status = self.process.wait();
    }
}

/// Parses a line such as `0 pod-a=50 pod-b=50`.
fn parse_round(line: &str) -> Option<PoolRound> {
    let mut words = line.split_whitespace();
    let failed = words.next()?.parse().ok()?;
    let served = words.map(|word| {
        let (pod, count) = word.split_once('=')?;
        Some((pod.to_owned(), count.parse().ok()?))
    });
    Some(PoolRound { failed, served: served.collect::<Option<_>>()? })
}

/// Command of each client, by its name.
fn client_commands() -> [(&'static str, Vec<String>); 5] {
    let servers = required_variable("ROUSE_SERVERS");
    let servers = Path::new(&servers);
    let java = servers.join("java");
    let jars = fs::read_to_string(java.join("jars")).expect("built with it");
    let classes = format!("{}:{}", java.display(), jars.trim());
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    [
        ("hyper", words(&[env!("CARGO_BIN_EXE_servers")])),
        ("Go", words(&[&servers.join("servers").to_string_lossy()])),
        ("Node", words(&["node", &client_script("pools.mjs")])),
        ("Python", words(&["python3", &client_script("pools.py")])),
        ("Java", words(&["java", "-XX:+UseSerialGC", "-Xmx256m", "-cp", &classes, "App"])),
    ]
}

/// Manifest whose latest Revision has this name and always at least `pods` pods, and whose traffic goes to `target`.
fn manifest(revision: &str, pods: usize, target: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata:
  name: pools
  namespace: default
spec:
  template:
    metadata:
      name: pools-{revision}
      annotations:
        autoscaling.knative.dev/initial-scale: \"{pods}\"
        autoscaling.knative.dev/min-scale: \"{pods}\"
        autoscaling.knative.dev/max-scale: \"{pods}\"
        autoscaling.knative.dev/window: 6s
    spec:
      timeoutSeconds: 30
      containers:
        - image: dev.local/hello:v1
          ports:
            - containerPort: 8080
  traffic:
    - revisionName: pools-{target}
      percent: 100
"
    )
}

/// Lets all clients send a round at the same time. No request may fail in this step of the test.
fn request_rounds(clients: &mut [PoolClient], step: &str) -> BTreeMap<String, usize> {
    let rounds: Vec<(&str, PoolRound)> = thread::scope(|scope| {
        let running: Vec<_> = clients
            .iter_mut()
            .map(|client| scope.spawn(move || (client.name, client.request_round())))
            .collect();
        running.into_iter().map(|thread| thread.join().expect("a round")).collect()
    });
    let mut served = BTreeMap::new();
    for (name, round) in rounds {
        assert_eq!(round.failed, 0, "{step}: {name}: {round:?}");
        assert_eq!(round.served.values().sum::<usize>(), ROUND, "{step}: {name}: {round:?}");
        for (pod, count) in round.served {
            *served.entry(pod).or_default() += count;
        }
    }
    served
}

/// Sends rounds until all requests of one are served by pods of a Revision, and then one more. Returns the requests
/// that each pod has served in that one. A failure tells the step of the test, and how many rounds it had.
fn move_to(
    clients: &mut [PoolClient],
    step: &str,
    revision: &str,
    pods: usize,
) -> BTreeMap<String, usize> {
    let prefix = format!("pools-{revision}-");
    let is_of_revision = |served: &BTreeMap<String, usize>| {
        served.len() == pods && served.keys().all(|pod| pod.starts_with(&prefix))
    };
    let (mut earlier, mut rounds) = (BTreeSet::new(), 0);
    wait_for(&format!("{step}: all traffic at {prefix}"), || {
        rounds += 1;
        let served = request_rounds(clients, &format!("{step} to {prefix}, round {rounds}"));
        earlier.extend(served.keys().cloned());
        is_of_revision(&served).then_some(())
    });
    let served = request_rounds(clients, &format!("{step} to {prefix}, all moved"));
    assert!(is_of_revision(&served), "{step}: traffic went back: {served:?}, after {earlier:?}");
    served
}

#[test]
fn pools_of_clients_follow_a_rollout_a_rollback_and_the_growth_to_four_pods() {
    let node = RouseNode::start("client-pools");
    let apply = |manifest: String| {
        let (is_applied, text) = node.apply(&manifest);
        assert!(is_applied, "{text}");
    };
    apply(manifest("one", 1, "one"));
    let address = node.wait_ready("pools");
    let url = format!("http://{address}/");
    let mut clients =
        client_commands().map(|(name, words)| PoolClient::start(&node, name, &words, &url));
    move_to(&mut clients, "start", "one", 1);
    apply(manifest("two", 1, "two"));
    move_to(&mut clients, "rollout", "two", 1);
    // The rollback wakes a Revision whose pod may have ended.
    apply(manifest("two", 1, "one"));
    move_to(&mut clients, "rollback", "one", 1);
    apply(manifest("four", 4, "four"));
    let served = move_to(&mut clients, "growth", "four", 4);
    // Each connect chooses its pod, so the shares follow from 40 connections, and not from 1,000 requests.
    let total: usize = served.values().sum();
    assert!(served.values().all(|count| *count * 2 <= total), "one pod has most: {served:?}");
}

#[test]
fn a_line_of_a_client_has_failures_and_pods() {
    let round = parse_round("1 pod-a=50 pod-b=49\n").expect("valid");
    let served = [("pod-a".to_owned(), 50), ("pod-b".to_owned(), 49)];
    assert_eq!((round.failed, round.served), (1, BTreeMap::from(served)));
    for line in ["", "x", "0 pod", "0 pod=x"] {
        assert!(parse_round(line).is_none(), "{line}");
    }
}
