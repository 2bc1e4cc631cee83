//! Shell: the demonstration, step by step.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Stdio},
    sync::mpsc::{self, Receiver, TryRecvError},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{
    observations::{DemoRun, PodSample, RequestPurpose},
    terminal::DemoScreen,
};
use crate::{
    load::{LoadRecord, unix_us},
    local_node::LocalNode,
    sh,
};

/// Name of the service inside the node, which the node's DNS resolves to the ClusterIP.
const SERVICE: &str = "hello.default.svc.cluster.local";
/// Load that rises to forty requests at once; the target is ten a pod (`examples/hello.yaml`).
const STAGES: &str = "4x2s,16x4s,40x14s";
/// Interval between two samples of the pods.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(200);
/// Timeout for scaling to zero: window of 6 s, the last pod's grace period, and a margin.
const SCALE_TO_ZERO_TIMEOUT: Duration = Duration::from_secs(40);

/// Timeout for the freeze of a pod: the start of a Revision's first pod, the window of 6 s, and a margin.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(40);
/// Number of requests that find the service with a frozen pod. Each takes a window.
const STANDBY_WAKES: usize = 3;
/// Line of the manifest before the annotations of the template, and the line that the third act adds after it.
const ANNOTATIONS_LINE: &str = "      annotations:\n";
const STANDBY_LINE: &str = "        rouse.dev/standby: \"1\"\n";

/// Number of consecutive samples without a pod after which the service counts as asleep. The list may lag behind a pod
/// that has just started.
const EMPTY_SAMPLES: u32 = 3;

/// Runs the demonstration and returns its requests and samples.
pub(super) fn run(node: &LocalNode, manifest: &Path) -> Result<DemoRun> {
    let mut runner = DemoRunner { node, screen: DemoScreen::new(), run: DemoRun::default() };
    runner.screen.print_line("the node is up");
    sh::capture(node.rouse_command(&["apply", "-f"]).arg(manifest))?;
    runner.wait_for_service()?;
    runner.sample_pods()?;
    let pods = runner.run.pods_now();
    runner.screen.print_line(&format!("hello is applied and asleep: {pods} pods"));

    runner.wake_service("a request comes")?;
    runner.screen.print_line("load rises to 40 requests at once");
    runner.send(RequestPurpose::Load, STAGES, "/?sleep=100", None)?;
    runner.screen.print_line("load stops");
    // Each wake must find no pod, or it would show the direct path.
    runner.wait_until_asleep()?;
    runner.wake_service("another request comes")?;
    runner.wait_until_asleep()?;
    runner.show_standby(manifest)?;
    Ok(runner.run)
}

/// Returns the manifest with a frozen pod for the time in which the service sleeps.
fn add_standby(manifest: &str) -> Result<String> {
    let at = manifest.find(ANNOTATIONS_LINE).context("the manifest's template is not annotated")?;
    let (before, after) = manifest.split_at(at + ANNOTATIONS_LINE.len());
    Ok([before, STANDBY_LINE, after].concat())
}

struct DemoRunner<'a> {
    node: &'a LocalNode,
    screen: DemoScreen,
    run: DemoRun,
}

impl DemoRunner<'_> {
    fn wait_for_service(&self) -> Result<()> {
        let mut last_message = String::new();
        for _ in 0..100 {
            // The list, because a service by name is an error until the controller has read the manifest.
            let list = self.get_json(&["ksvc"])?;
            let conditions = list["items"][0]["status"]["conditions"].as_array();
            let conditions = conditions.cloned().unwrap_or_default();
            let ready = conditions.iter().find(|condition| condition["type"] == "Ready");
            match ready.map(|condition| (condition["status"].as_str(), &condition["message"])) {
                Some((Some("True"), _)) => return Ok(()),
                Some((_, message)) => last_message = message.to_string(),
                None => {}
            }
            sh::sleep(Duration::from_millis(100));
        }
        bail!("service hello did not become ready within 10 s: {last_message}")
    }

    fn wake_service(&mut self, description: &str) -> Result<()> {
        self.screen.print_line(&format!("{description} while no pod runs; it waits"));
        self.send_wake(RequestPurpose::Wake)
    }

    /// Third act: the same service keeps a frozen pod, which answers at once.
    fn show_standby(&mut self, manifest: &Path) -> Result<()> {
        let text = fs::read_to_string(manifest)
            .with_context(|| format!("cannot read {}", manifest.display()))?;
        let file = self.node.log_file().with_file_name("standby.yaml");
        fs::write(&file, add_standby(&text)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
        sh::capture(self.node.rouse_command(&["apply", "-f"]).arg(&file))?;
        self.screen.print_line("hello is applied with the annotation rouse.dev/standby: \"1\"");
        for _ in 0..STANDBY_WAKES {
            // This machine cannot freeze pods, so the demonstration ends here.
            if !self.wait_until_frozen()? {
                return Ok(());
            }
            self.screen.print_line("a request comes while its pod is frozen");
            self.send_wake(RequestPurpose::StandbyWake)?;
        }
        self.wait_until_frozen().map(drop)
    }

    /// Sends one request, and prints how it was answered.
    fn send_wake(&mut self, purpose: RequestPurpose) -> Result<()> {
        let records_before = self.run.records.len();
        self.send(purpose, "1x60s", "/", Some("1"))?;
        // Records of an earlier load must not count as the response.
        let record = self.run.records.get(records_before..).and_then(<[_]>::last);
        let (_, record) = record.context("the load generator reported nothing")?;
        let text = match record.is_answered() {
            true => format!(
                "response from {} after {:.1} ms",
                record.pod,
                record.first_byte_us as f64 / 1e3
            ),
            false => format!("no response from a pod: status {} {}", record.status, record.error),
        };
        self.screen.print_line(&text);
        Ok(())
    }

    fn wait_until_asleep(&mut self) -> Result<()> {
        let max_samples = SCALE_TO_ZERO_TIMEOUT.as_millis() / SAMPLE_INTERVAL.as_millis();
        let mut empty_samples = 0;
        for _ in 0..max_samples {
            self.sample_pods()?;
            // Counted in a row: a pod that appears again starts the count from zero.
            empty_samples = if self.run.pods_now() == 0 { empty_samples + 1 } else { 0 };
            if empty_samples == EMPTY_SAMPLES {
                self.run.times_asleep += 1;
                self.screen.print_line("asleep again: no pod is left");
                return Ok(());
            }
            self.screen.redraw_live_line(&self.run.live_line(unix_us()));
            sh::sleep(SAMPLE_INTERVAL);
        }
        self.screen.print_line(&format!(
            "still {} pods after {SCALE_TO_ZERO_TIMEOUT:?}",
            self.run.pods_now()
        ));
        Ok(())
    }

    /// Waits until the service has one pod, which is frozen. Returns true if it has.
    fn wait_until_frozen(&mut self) -> Result<bool> {
        for _ in 0..FREEZE_TIMEOUT.as_millis() / SAMPLE_INTERVAL.as_millis() {
            self.sample_pods()?;
            if self.run.is_on_standby() {
                self.screen.print_line("asleep: its only pod is frozen");
                return Ok(true);
            }
            self.screen.redraw_live_line(&self.run.live_line(unix_us()));
            sh::sleep(SAMPLE_INTERVAL);
        }
        self.screen.print_line(&format!("no pod is frozen after {FREEZE_TIMEOUT:?}"));
        Ok(false)
    }

    /// Sends load from the client's namespace, samples the pods meanwhile, and stores the records.
    fn send(
        &mut self,
        purpose: RequestPurpose,
        stages: &str,
        path: &str,
        requests: Option<&str>,
    ) -> Result<()> {
        let xtask = std::env::current_exe().context("cannot find xtask's own program")?;
        let mut load = self.node.client_command(&xtask);
        load.args(["load", "--addr", &format!("{SERVICE}:80"), "--host", SERVICE]);
        load.args(["--stages", stages, "--path", path]);
        load.args(requests.iter().flat_map(|requests| ["--requests", requests]));
        load.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut load = load.spawn().context("cannot start the load generator")?;
        let records = read_records(&mut load)?;
        // Records and pods are read in turns: the live line needs both.
        let mut is_over = false;
        while !is_over {
            is_over = self.store_records(purpose, &records);
            self.sample_pods()?;
            self.screen.redraw_live_line(&self.run.live_line(unix_us()));
            if !is_over {
                sh::sleep(SAMPLE_INTERVAL);
            }
        }
        let status = load.wait()?;
        if !status.success() {
            bail!("the load generator ended with {status}");
        }
        Ok(())
    }

    /// Stores the records that the load generator has printed so far. Returns true if it has ended.
    fn store_records(&mut self, purpose: RequestPurpose, records: &Receiver<LoadRecord>) -> bool {
        loop {
            match records.try_recv() {
                Ok(record) => self.run.records.push((purpose, record)),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
    }

    /// Samples the number of pods, of ready and of frozen pods.
    fn sample_pods(&mut self) -> Result<()> {
        let list = self.get_json(&["pods"])?;
        let pods = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
        let is_ready = |pod: &&Value| {
            let conditions = pod["status"]["conditions"].as_array();
            conditions.is_some_and(|conditions| {
                conditions
                    .iter()
                    .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
            })
        };
        let ready = pods.iter().filter(is_ready).count();
        let frozen = self.node.frozen_pods()?.len();
        self.run.samples.push(PodSample { at_us: unix_us(), pods: pods.len(), ready, frozen });
        Ok(())
    }

    fn get_json(&self, args: &[&str]) -> Result<Value> {
        let text = sh::capture(self.node.rouse_command(&["get"]).args(args).args(["-o", "json"]))?;
        serde_json::from_str(&text).context("cannot read the output of `rouse get -o json`")
    }
}

fn read_records(load: &mut Child) -> Result<Receiver<LoadRecord>> {
    let stdout = load.stdout.take().context("the load generator's output was piped")?;
    // Bounded: the demo reads several times a second, and a full channel only delays the printing.
    let (sender, records) = mpsc::sync_channel(65_536);
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let Ok(record) = serde_json::from_str(&line) else { continue };
            if sender.send(record).is_err() {
                return;
            }
        }
    });
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_annotation_is_added_to_the_template_of_the_example() {
        let manifest = include_str!("../../../examples/hello.yaml");
        let changed = add_standby(manifest).unwrap();
        let added: Vec<&str> = changed.lines().filter(|it| !manifest.contains(it)).collect();
        assert_eq!(added, [STANDBY_LINE.trim_end()]);
        assert_eq!(changed.lines().count(), manifest.lines().count() + 1);
        let (_, after) = changed.split_once("  template:\n").unwrap();
        let head = format!("    metadata:\n{ANNOTATIONS_LINE}{STANDBY_LINE}");
        assert!(after.starts_with(&head), "{changed}");
        assert!(add_standby("kind: Service\n").is_err(), "nothing to add it to");
    }
}
