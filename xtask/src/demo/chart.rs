//! Pure: the run as an SVG chart: requests in flight by path, and pods, over time.

use std::fmt::Write as _;

use super::observations::{DemoRun, PodSample, RequestPurpose};
use crate::load::LoadRecord;

/// Size of the chart and of the frame around its two plots, in SVG's units.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 940.0;
/// Top and bottom of the upper plot (requests in flight) and of the lower one (pods).
const REQUESTS_PLOT: (f64, f64) = (60.0, 300.0);
const PODS_PLOT: (f64, f64) = (350.0, 470.0);
const HEIGHT: f64 = 520.0;
/// Width of one bar, in µs of the run.
const STEP_US: u64 = 100_000;

const DIRECT_COLOR: &str = "#2a9d8f";
const ACTIVATOR_COLOR: &str = "#e9a23b";
const POD_COLOR: &str = "#264653";
const FROZEN_COLOR: &str = "#5aa9e6";
const GRID_COLOR: &str = "#cccccc";

/// Draws the chart of a run.
pub(super) fn svg(run: &DemoRun) -> String {
    let records: Vec<&LoadRecord> = run.records.iter().map(|(_, record)| record).collect();
    let first = records.iter().map(|record| record.at_us).min().unwrap_or(0);
    // The chart ends with the pods, which stay for a while after the last request.
    let last_sample_us = run.samples.last().map_or(first, |sample| sample.at_us);
    let steps = (last_sample_us.saturating_sub(first) / STEP_US + 1) as usize;
    let bars = chart_bars(&records, first, steps);
    let max_requests = bars.iter().map(|bar| bar.direct + bar.activator).fold(1.0, f64::max);
    let x = |step: f64| LEFT + (RIGHT - LEFT) * step / steps as f64;

    let mut out = svg_head();
    draw_axis(&mut out, "requests in flight", max_requests, REQUESTS_PLOT);
    for (step, bar) in bars.iter().enumerate() {
        // Stacked bars: the direct path below, the activator path on top of it.
        let mut bottom = REQUESTS_PLOT.1;
        for (level, color) in [(bar.direct, DIRECT_COLOR), (bar.activator, ACTIVATOR_COLOR)] {
            let height = (REQUESTS_PLOT.1 - REQUESTS_PLOT.0) * level / max_requests;
            bottom -= height;
            if level > 0.0 {
                let (bar_x, width) = (x(step as f64), x(1.0) - x(0.0));
                // Writing to a string cannot fail.
                let _ = writeln!(
                    out,
                    r#"<rect x="{bar_x:.2}" y="{bottom:.2}" width="{width:.2}" height="{height:.2}" fill="{color}"/>"#
                );
            }
        }
    }
    for (purpose, wake) in &run.records {
        let (label, color) = match purpose {
            RequestPurpose::Wake => ("a request wakes it", ACTIVATOR_COLOR),
            RequestPurpose::StandbyWake => ("from standby", FROZEN_COLOR),
            RequestPurpose::Load => continue,
        };
        draw_wake(&mut out, x((wake.at_us - first) as f64 / STEP_US as f64), label, color);
    }
    let max_pods = run.samples.iter().map(|sample| sample.ready).max().unwrap_or(0).max(1) as f64;
    draw_axis(&mut out, "ready pods", max_pods, PODS_PLOT);
    let ready: fn(&PodSample) -> usize = |sample| sample.ready;
    for (count, color) in [(ready, POD_COLOR), (|sample| sample.frozen, FROZEN_COLOR)] {
        let _ = writeln!(
            out,
            r#"<path d="{}" fill="none" stroke="{color}" stroke-width="2"/>"#,
            pods_path(run, first, max_pods, count, |us| x(us as f64 / STEP_US as f64))
        );
    }
    draw_time_labels(&mut out, steps, x);
    out + "</svg>\n"
}

/// Requests in flight during one step, by their path.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ChartBar {
    direct: f64,
    activator: f64,
}

/// Adds each request to the steps that it spans, weighted by its share of the step's time.
fn chart_bars(records: &[&LoadRecord], first: u64, steps: usize) -> Vec<ChartBar> {
    let mut bars = vec![ChartBar::default(); steps];
    for record in records {
        let start = record.at_us - first;
        let end = start + record.took_us.max(1);
        // A request that ends exactly at a step's border does not touch the next step.
        let spanned = (start / STEP_US) as usize..=((end - 1) / STEP_US) as usize;
        for step in spanned.take_while(|step| *step < steps) {
            let overlap_start = (step as u64 * STEP_US).max(start);
            let overlap_end = ((step as u64 + 1) * STEP_US).min(end);
            let share = (overlap_end - overlap_start) as f64 / STEP_US as f64;
            let bar = &mut bars[step];
            let count = if record.direct { &mut bar.direct } else { &mut bar.activator };
            *count += share;
        }
    }
    bars
}

/// Draws the vertical line of a request that found the service asleep.
fn draw_wake(out: &mut String, x: f64, label: &str, color: &str) {
    let ((top, _), (_, bottom)) = (REQUESTS_PLOT, PODS_PLOT);
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        r#"<line x1="{x:.2}" y1="{top}" x2="{x:.2}" y2="{bottom}" stroke="{color}" stroke-dasharray="4 3"/>
<text x="{:.2}" y="{}">{label}</text>"#,
        x + 4.0,
        top + 16.0
    );
}

/// Returns the data of the SVG path that shows the number of pods that `count` takes from each sample.
fn pods_path(
    run: &DemoRun,
    first: u64,
    max_pods: f64,
    count: fn(&PodSample) -> usize,
    x: impl Fn(u64) -> f64,
) -> String {
    let mut line = String::new();
    let mut last = PODS_PLOT.1;
    for sample in &run.samples {
        let sample_x = x(sample.at_us.saturating_sub(first));
        let y = PODS_PLOT.1 - (PODS_PLOT.1 - PODS_PLOT.0) * count(sample) as f64 / max_pods;
        let start = if line.is_empty() { 'M' } else { 'L' };
        // A vertical step, not a slope: the number of pods is whole.
        let _ = write!(line, "{start}{sample_x:.2} {last:.2} L{sample_x:.2} {y:.2} ");
        last = y;
    }
    line
}

fn svg_head() -> String {
    let (center, title) = (WIDTH / 2.0, "From zero to many pods and back: examples/hello.yaml");
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" shape-rendering="crispEdges" font-family="sans-serif" font-size="13">
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
<text x="{center}" y="24" text-anchor="middle" font-size="16">{title}</text>
<rect x="460" y="36" width="12" height="12" fill="{FROZEN_COLOR}"/><text x="478" y="47">frozen pods</text>
<rect x="600" y="36" width="12" height="12" fill="{DIRECT_COLOR}"/><text x="618" y="47">straight to a pod</text>
<rect x="760" y="36" width="12" height="12" fill="{ACTIVATOR_COLOR}"/><text x="778" y="47">through the activator</text>
"##
    )
}

fn draw_axis(out: &mut String, title: &str, max_value: f64, (top, bottom): (f64, f64)) {
    let above = top - 8.0;
    let _ = writeln!(
        out,
        r#"<text x="{LEFT}" y="{above}">{title}</text>
<line x1="{LEFT}" y1="{top}" x2="{RIGHT}" y2="{top}" stroke="{GRID_COLOR}"/>
<line x1="{LEFT}" y1="{bottom}" x2="{RIGHT}" y2="{bottom}" stroke="{GRID_COLOR}"/>
<text x="{}" y="{}" text-anchor="end">{max_value:.0}</text>
<text x="{}" y="{bottom}" text-anchor="end">0</text>"#,
        LEFT - 8.0,
        top + 5.0,
        LEFT - 8.0
    );
}

/// Draws a time label below the lower plot every five seconds.
fn draw_time_labels(out: &mut String, steps: usize, x: impl Fn(f64) -> f64) {
    let steps_a_second = (1_000_000 / STEP_US) as usize;
    for second in (0..=steps / steps_a_second).step_by(5) {
        let _ = writeln!(
            out,
            r#"<text x="{:.2}" y="{}" text-anchor="middle">{second} s</text>"#,
            x((second * steps_a_second) as f64),
            PODS_PLOT.1 + 22.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(at_us: u64, took_us: u64, direct: bool) -> LoadRecord {
        LoadRecord {
            at_us,
            took_us,
            first_byte_us: took_us,
            status: 200,
            fresh: true,
            pod: String::new(),
            direct,
            listening_us: 0,
            error: String::new(),
        }
    }

    #[test]
    fn a_request_counts_in_each_step_by_the_time_it_lasted_there() {
        let (one, two) = (record(1_000_000, 150_000, true), record(1_050_000, 50_000, false));
        let bars = chart_bars(&[&one, &two], 1_000_000, 3);
        let bar = |direct, activator| ChartBar { direct, activator };
        assert_eq!(bars, [bar(1.0, 0.5), bar(0.5, 0.0), bar(0.0, 0.0)]);
    }

    #[test]
    fn a_wake_from_standby_and_its_frozen_pod_have_their_own_color() {
        let sample = |at_us, frozen| PodSample { at_us, pods: 1, ready: 1, frozen };
        let run = DemoRun {
            records: vec![(RequestPurpose::StandbyWake, record(2_000_000, 600, true))],
            samples: vec![sample(2_000_000, 1), sample(2_200_000, 0)],
            ..DemoRun::default()
        };
        let svg = svg(&run);
        assert_eq!(svg.matches("from standby").count(), 1, "{svg}");
        assert!(!svg.contains("a request wakes it"), "{svg}");
        let path = svg.lines().rfind(|line| line.starts_with("<path ")).unwrap();
        assert!(path.contains(FROZEN_COLOR), "{path}");
        // One frozen pod at first, and then none.
        let (top, bottom) = PODS_PLOT;
        assert!(path.contains(&format!(" L60.00 {top:.2} ")), "{path}");
        assert!(path.contains(&format!("{bottom:.2} \"")), "{path}");
    }

    #[test]
    fn an_empty_run_still_gives_a_picture() {
        let svg = svg(&DemoRun::default());
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }
}
