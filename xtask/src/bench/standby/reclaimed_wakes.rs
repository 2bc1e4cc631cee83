//! Shell: wakes of large applications whose memory was reclaimed, beside their cold starts.
//!
//! The applications run from the packages of this machine, whose files each node sees.

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, bail};

use super::{
    BenchClientPod, BenchCluster, BenchGoal, BenchRow, ClusterBenchContext, NO_FIRST_POD,
    RoundValues, STANDBY, delete_services, manifest, send_request, wait_for_pods, wake_rows,
};
use crate::{
    bench::{cluster_context::SYSTEM_NAMESPACE, stats::median},
    sh,
};

/// Annotation by which the memory of a frozen pod is reclaimed, after that for standby.
const RECLAIM: &str = ", rouse.dev/standby-memory: reclaim";
/// Directories with the programs and their libraries. A machine need not have all of them.
const SYSTEM_FOLDERS: [&str; 5] = ["/bin", "/etc", "/lib", "/lib64", "/usr"];
/// Time after which each replica follows a changed ConfigMap.
const SETTING_EFFECTIVE_AFTER: Duration = Duration::from_secs(20);
/// Highest ratio of a wake to the median of the cold starts.
const MAX_RATIO: f64 = 0.25;

/// Server in Python that holds 200 MiB.
const PYTHON_SOURCE: &str = r#"from http.server import BaseHTTPRequestHandler, HTTPServer

MEMORY = bytearray(b"x") * (200 << 20)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"python\n")

    def log_message(self, *_):
        pass


HTTPServer(("", 8080), Handler).serve_forever()
"#;
/// Server for a JVM.
const JAVA_SOURCE: &str = r#"import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;

public class Server {
  public static void main(String[] args) throws Exception {
    HttpServer server = HttpServer.create(new InetSocketAddress(8080), 0);
    server.createContext("/", exchange -> {
      byte[] body = "java\n".getBytes();
      exchange.sendResponseHeaders(200, body.length);
      exchange.getResponseBody().write(body);
      exchange.close();
    });
    server.start();
  }
}
"#;

/// Applications: the name, and the command in YAML's flow style. Their files are in `/bench`.
const APPS: [(&str, &str); 2] = [
    ("python", "[/usr/bin/python3, /bench/server.py]"),
    ("jvm", "[/usr/bin/java, \"-XX:-UsePerfData\", -cp, /bench, Server]"),
];

/// Parts of the manifests of an application.
#[derive(Debug)]
struct AppManifest {
    name: &'static str,
    /// Content of the container, in YAML's flow style.
    container: String,
    /// Lines of the template's spec.
    volumes: String,
}

/// Measures the wakes of both applications. Prints the reason if this machine cannot run them, or reclaims no memory.
pub(super) fn run(
    context: &ClusterBenchContext,
    cluster: &BenchCluster,
    clients: &[BenchClientPod],
    rounds: u32,
) -> Result<Vec<BenchRow>> {
    if let Some(reason) = find_obstacle() {
        println!("standby: wake_reclaimed is left out: {reason}");
        return Ok(Vec::new());
    }
    let folder = context.folder.join("standby");
    write_servers(&folder)?;
    let patch = r#"{"data":{"kubernetes.podspec-volumes-hostpath":"enabled"}}"#;
    let patch = ["patch", "configmap", "-n", SYSTEM_NAMESPACE, "config-features", "--patch", patch];
    cluster.kubectl(&patch)?;
    // The webhook refuses the volumes until it has read the ConfigMap again.
    sh::sleep(SETTING_EFFECTIVE_AFTER);
    let mut rows = Vec::new();
    for (name, command) in APPS {
        let app = AppManifest { name, container: container(command), volumes: volumes(&folder) };
        rows.extend(measure(cluster, &clients[0], &app, rounds)?);
    }
    Ok(rows)
}

/// Returns the reason for which the bench would measure nothing on this machine; `None` if there is none.
fn find_obstacle() -> Option<String> {
    let controllers = crate::machine::cgroup2().map(|mount| mount.join("cgroup.controllers"));
    let controllers = controllers.and_then(|file| fs::read_to_string(file).ok());
    if !controllers.unwrap_or_default().split_whitespace().any(|name| name == "memory") {
        return Some("cgroup v2 has no memory controller here".to_owned());
    }
    let programs = ["/usr/bin/python3", "/usr/bin/java"].into_iter();
    let mut missing = programs.filter(|program| !Path::new(program).exists());
    let missing = missing.next().or_else(|| sh::which("javac").is_none().then_some("javac"));
    missing.map(|program| format!("{program} is missing"))
}

/// Writes the servers to a directory that each node sees.
fn write_servers(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let source = folder.join("Server.java");
    for (file, text) in [(&folder.join("server.py"), PYTHON_SOURCE), (&source, JAVA_SOURCE)] {
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    sh::run(Command::new("javac").arg("-d").arg(folder).arg(&source))
}

/// Directories that the pods mount: name of the volume and path on the node. The name is also the path in the pod.
fn mounted_folders(folder: &Path) -> Vec<(String, String)> {
    let system = SYSTEM_FOLDERS.into_iter().filter(|path| Path::new(path).is_dir());
    let system = system.map(|path| (path.trim_start_matches('/').to_owned(), path.to_owned()));
    system.chain([("bench".to_owned(), folder.display().to_string())]).collect()
}

/// Content of the container of an application with this command, in YAML's flow style.
fn container(command: &str) -> String {
    let mount = |(name, _): &(String, String)| format!("{{ name: {name}, mountPath: /{name} }}");
    // Of the folder only the name in the pod counts here, which is always the same.
    let mounts: Vec<String> = mounted_folders(Path::new("")).iter().map(mount).collect();
    let mounts = mounts.join(", ");
    format!("image: \"dev.local/hello:v1\", command: {command}, volumeMounts: [{mounts}]")
}

/// Lines of a template's spec with the volumes of its pods.
fn volumes(folder: &Path) -> String {
    let volume = |(name, path): &(String, String)| {
        format!("{{ name: {name}, hostPath: {{ path: \"{path}\", type: Directory }} }}")
    };
    let volumes: Vec<String> = mounted_folders(folder).iter().map(volume).collect();
    format!("      volumes: [{}]\n", volumes.join(", "))
}

/// Measures the wakes and cold starts of one application, in turn.
fn measure(
    cluster: &BenchCluster,
    client: &BenchClientPod,
    app: &AppManifest,
    rounds: u32,
) -> Result<Vec<BenchRow>> {
    let AppManifest { name, container, volumes } = app;
    let names = [format!("{name}-kept"), format!("{name}-cold")];
    let reclaiming = format!("{STANDBY}{RECLAIM}");
    let yaml = manifest(&names[0], &reclaiming, container, volumes)
        + &manifest(&names[1], NO_FIRST_POD, container, volumes);
    cluster.create_services(&yaml, &names)?;
    let addresses = names.iter().map(|name| Ok(format!("{}:80", cluster.cluster_ip(name)?)));
    let addresses = addresses.collect::<Result<Vec<String>>>()?;
    let mut times = RoundValues::new();
    for round in 0..=rounds {
        // The pod on standby is frozen, and that of the last cold start is gone.
        wait_for_pods(cluster, 1, 1)?;
        for (subject, address) in ["rouse", "cold"].into_iter().zip(&addresses) {
            let record = send_request(cluster, client, address, name)?;
            if !record.is_answered() {
                bail!("{subject} {name}: status {} {}", record.status, record.error);
            }
            // The first round finds cold caches.
            if round > 0 {
                times.entry(subject).or_default().push(record.first_byte_us as f64 / 1e3);
            }
        }
    }
    delete_services(cluster, &names)?;
    // A wake that reads its memory back is worth it only if it is much faster than a start.
    let cold = times.get("cold").map_or(f64::NAN, |times| median(times).value);
    let goal = BenchGoal::AtMost((cold * MAX_RATIO).round());
    Ok(wake_rows(&format!("wake_reclaimed_{name}"), &times, goal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mount_of_a_container_has_its_volume() {
        let (container, volumes) = (container("[a]"), volumes(Path::new("/srv/bench")));
        assert!(container.contains("{ name: bench, mountPath: /bench }"), "{container}");
        let volume = "{ name: bench, hostPath: { path: \"/srv/bench\", type: Directory } }";
        assert!(volumes.contains(volume), "{volumes}");
        let mounted = container.matches("mountPath").count();
        assert_eq!(mounted, volumes.matches("hostPath").count());
        assert!(mounted > 1, "the programs of the machine are mounted: {container}");
    }
}
