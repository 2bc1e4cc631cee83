//! Pure: plays conversations of [`super::frame_script`] to the model and to the reference.

use super::{
    EventComparison,
    frame_script::TurnSender,
    reference::{Http2Reference, ReferenceEvent},
};
use crate::{
    ebpf_model::{EbpfModel, ModelEvent},
    rng::SeededRng,
    segmentation::{self, ReceivedRanges},
    totals::ConformanceTotals,
};

/// Parses the turns of a conversation, as far as they are whole.
fn parse_turns(mut text: &[u8]) -> Vec<(TurnSender, &[u8])> {
    let mut turns = Vec::new();
    while let [who, high, low, rest @ ..] = text {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (bytes, more) = rest.split_at(len);
        let sender = if *who == b'<' { TurnSender::Server } else { TurnSender::Client };
        turns.push((sender, bytes));
        text = more;
    }
    turns
}

/// Plays a conversation, cut by `rng`. The error describes the difference between model and reference.
pub fn play(conversation: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let turns = parse_turns(conversation);
    let (mut model, mut reference) = (EbpfModel::new(), Http2Reference::default());
    let mut comparison = EventComparison::default();
    let (mut requests, mut responses) = (0, 0);
    for burst in turns.chunk_by(|one, other| one.0 == other.0) {
        let bytes: Vec<u8> = burst.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
        if burst[0].0 == TurnSender::Server {
            let has_gap = false;
            for segment in segmentation::split(0, bytes.len(), rng) {
                model.response_segment(responses + segment.start, &bytes[segment.clone()]);
                reference.receive_server(&bytes[segment]);
                compare(&mut comparison, &model, &reference, has_gap)?;
            }
            responses += bytes.len();
        } else {
            let mut received = ReceivedRanges::default();
            for segment in segmentation::arrival_order(bytes.len(), rng) {
                model.request_segment(requests + segment.start, &bytes[segment.clone()]);
                reference.receive_client(&bytes[received.add_segment(&segment)]);
                compare(&mut comparison, &model, &reference, received.has_gap())?;
            }
            requests += bytes.len();
        }
    }
    model.close(true);
    Ok(comparison.totals(comparison.responded(), reference.is_broken))
}

fn compare(
    comparison: &mut EventComparison,
    model: &EbpfModel,
    reference: &Http2Reference,
    has_gap: bool,
) -> Result<(), String> {
    comparison.has_had_gap |= has_gap;
    // Bytes behind an error have no meaning, and before the preface the protocol is not known.
    if has_gap || reference.is_broken || !reference.has_begun() {
        return Ok(());
    }
    comparison.compare(model, reference).map_err(|what| {
        format!("{what}\n  events {:?}\n  reference {:?}", model.events(), reference.events)
    })
}

/// Plays a conversation in which whole bursts of the client's bytes are lost; the server's responses must still be
/// counted. The error describes the difference.
pub fn play_with_losses(
    conversation: &[u8],
    rng: &mut SeededRng,
) -> Result<ConformanceTotals, String> {
    let turns = parse_turns(conversation);
    let (mut model, mut reference) = (EbpfModel::new(), Http2Reference::default());
    let (mut requests, mut responses) = (0, 0);
    for (index, burst) in turns.chunk_by(|one, other| one.0 == other.0).enumerate() {
        let bytes: Vec<u8> = burst.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
        if burst[0].0 == TurnSender::Server {
            model.response_segment(responses, &bytes);
            reference.receive_server(&bytes);
            responses += bytes.len();
            continue;
        }
        // Nothing is lost before the protocol is known.
        if index > 1 && model.is_http2() && rng.next_bool(30) {
            model.desync_requests();
            model.skip_request(requests, bytes.len());
        } else {
            // One frame per segment, as clients write them.
            let mut at = requests;
            for (_, frame) in burst {
                model.request_segment(at, frame);
                at += frame.len();
            }
        }
        reference.receive_client(&bytes);
        requests += bytes.len();
    }
    model.close(true);
    let responded = |it: &&ModelEvent| matches!(it, ModelEvent::Responded(..));
    let (model_responses, reference_responses) = (
        model.events().iter().filter(responded).count(),
        reference.events.iter().filter(|it| matches!(it, ReferenceEvent::Responded(_))).count(),
    );
    // The server may respond to streams that were reset unseen, left out by a GOAWAY or never opened; the reference
    // does not count these.
    let is_plain = !reference.events.iter().any(|it| matches!(it, ReferenceEvent::Aborted(_)));
    let is_whole =
        !reference.is_broken && reference.last_processed.is_none() && !model.has_untracked();
    if is_plain && is_whole && model_responses < reference_responses {
        let log = &reference.events;
        return Err(format!(
            "{model_responses} responses, not {reference_responses}\n  {:?}\n  {log:?}",
            model.events()
        ));
    }
    let is_compared = is_plain && is_whole;
    let has_lost = model.events().contains(&ModelEvent::Desync);
    Ok(ConformanceTotals {
        requests: if is_compared && has_lost { reference_responses as u64 } else { 0 },
        refused: u64::from(reference.is_broken),
        not_compared: u64::from(!is_compared),
        crowded: 0,
    })
}
