//! Shell: CPU requests that frozen pods give back, and that they get again once they serve.

use anyhow::Result;

use super::{
    BenchClientPod, BenchCluster, BenchGoal, BenchRow, HELLO_CONTAINER, SERVICE_LABEL, STANDBY,
    bursts, case_row, manifest, wait_for_pods,
};

/// Number of services, each with one pod.
const SERVICES: usize = 10;
/// CPU request of each pod, in thousandths of a processor.
const CPU_MILLI: f64 = 100.0;

/// Measures the sum of all CPU requests: of running pods, of frozen ones, and of the same pods once they serve.
pub(super) fn run(cluster: &BenchCluster, clients: &[BenchClientPod]) -> Result<Vec<BenchRow>> {
    let names: Vec<String> = (0..SERVICES).map(|index| format!("sized{index}")).collect();
    let container = format!(
        "{HELLO_CONTAINER}, resources: {{ requests: {{ cpu: {CPU_MILLI}m, memory: 64Mi }} }}"
    );
    let yaml = names.iter().map(|name| manifest(name, STANDBY, &container, ""));
    cluster.create_services(&yaml.collect::<String>(), &names)?;
    wait_for_pods(cluster, SERVICES, SERVICES)?;
    let sums = measure_sums(cluster, &clients[0], &names);
    // An API server or a node may be unable to resize pods. That must not cost the figures of the other cases.
    let [frozen, restored] = match sums {
        Ok(sums) => sums,
        Err(error) => {
            println!("standby: resize is left out: {error:#}");
            return Ok(Vec::new());
        }
    };
    let rows =
        [("running", CPU_MILLI * SERVICES as f64), ("frozen", frozen), ("restored", restored)];
    let row = |(subject, sum)| case_row("resize", subject, "mCPU", &[sum], BenchGoal::None);
    Ok(rows.map(row).into())
}

/// Returns the sum of the CPU requests once the frozen pods have reduced ones, and once all have their first ones
/// again.
fn measure_sums(
    cluster: &BenchCluster,
    client: &BenchClientPod,
    names: &[String],
) -> Result<[f64; 2]> {
    let targets = bursts::targets(cluster, names)?;
    let sum_if = |requests: &[f64], is_done: fn(f64) -> bool| {
        let are_done = requests.len() == names.len() && requests.iter().all(|it| is_done(*it));
        are_done.then(|| requests.iter().sum::<f64>())
    };
    let frozen = cluster.wait("small requests of all frozen pods", || {
        Ok(sum_if(&cpu_requests(cluster)?, |milli| milli < CPU_MILLI))
    })?;
    let restored = cluster.wait("the first requests of all pods", || {
        // Each attempt sends requests, so that no pod is frozen again before all have their CPU requests.
        bursts::wake_all(cluster, client, &targets)?;
        Ok(sum_if(&cpu_requests(cluster)?, |milli| milli >= CPU_MILLI))
    })?;
    Ok([frozen, restored])
}

/// CPU requests of the pods of all services, in thousandths of a processor.
fn cpu_requests(cluster: &BenchCluster) -> Result<Vec<f64>> {
    let pods = cluster.list(&["pods", "--selector", SERVICE_LABEL])?;
    let request = |pod: &serde_json::Value| {
        parse_milli(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"].as_str()?)
    };
    // A CPU request that cannot be read counts neither as reduced nor as restored.
    Ok(pods.iter().map(|pod| request(pod).unwrap_or(f64::NAN)).collect())
}

/// Parses a quantity of processors, as `100m` or `2`, to thousandths; `None` for another text.
fn parse_milli(quantity: &str) -> Option<f64> {
    match quantity.strip_suffix('m') {
        Some(milli) => milli.parse().ok(),
        None => quantity.parse::<f64>().ok().map(|processors| processors * 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_of_processors_are_read_in_thousandths() {
        let read = ["1m", "100m", "2", "0.5", "x"].map(parse_milli);
        assert_eq!(read, [Some(1.0), Some(100.0), Some(2000.0), Some(500.0), None]);
    }
}
