//! The layout of a run's ranks as a drawing: a row for each pipeline stage, a frame for each
//! replica, and in it a box for each rank, grouped by shard.

use std::fmt::Write as _;

use super::html::escaped;
use crate::run_records::RunRecords;
use hpctrain_base::mesh::Mesh;

/// The maximum number of stages, replicas, shards and tensor slices that are drawn; if there are
/// more, a note says so.
const MOST: [usize; 4] = [8, 4, 8, 4];

/// The width and height of a rank's box.
const BOX: (usize, usize) = (46, 26);

/// The space between boxes, and around frames.
const GAP: usize = 6;

/// The space for the name of a stage.
const LEFT: usize = 78;

/// The space for the name of a replica.
const TOP: usize = 22;

/// Returns the drawing with a caption.
pub fn drawing(run: &RunRecords) -> String {
    if !run.worker_records.is_empty() {
        return server_drawing(run);
    }
    let mesh = run.mesh();
    let zero = u8::from(run.config.parallel.zero);
    let words = format!(
        "pipeline {} × replica {} × shard {} × tensor {} = {} rank{}, ZeRO {zero}",
        mesh.pipeline,
        mesh.replica,
        mesh.shard,
        mesh.tensor,
        mesh.ranks(),
        if mesh.ranks() == 1 { "" } else { "s" }
    );
    format!("<p>{}</p>\n<div class=\"layout scroll\">{}</div>\n", escaped(&words), svg(mesh))
}

/// Returns the drawing of a run with parameter servers.
fn server_drawing(run: &RunRecords) -> String {
    let mut workers: Vec<&str> =
        run.worker_records.iter().map(|given| given.worker.as_str()).collect();
    workers.sort_unstable();
    workers.dedup();
    let words = format!(
        "parameter servers, and {} worker{} that pushed gradients: {}",
        workers.len(),
        if workers.len() == 1 { "" } else { "s" },
        workers.iter().take(32).copied().collect::<Vec<_>>().join(", ")
    );
    let shown = workers.len().min(8);
    let width = (shown * 70 + 10).max(150);
    let mut svg = open(width, 110, &words);
    let _ = write!(
        svg,
        "<rect x=\"5\" y=\"5\" width=\"{}\" height=\"30\" rx=\"4\" fill=\"var(--c1)\" fill-opacity=\".25\" stroke=\"var(--c1)\"/>\
         <text x=\"{}\" y=\"25\" text-anchor=\"middle\" font-size=\"13\">servers</text>",
        width - 10,
        width / 2
    );
    for worker in 0..shown {
        let x = 10 + 70 * worker;
        let _ = write!(
            svg,
            "<line x1=\"{0}\" y1=\"75\" x2=\"{0}\" y2=\"36\" stroke=\"var(--quiet)\"/>\
             <rect x=\"{x}\" y=\"75\" width=\"60\" height=\"26\" rx=\"4\" fill=\"var(--c0)\" fill-opacity=\".25\" stroke=\"var(--c0)\"/>\
             <text x=\"{0}\" y=\"93\" text-anchor=\"middle\" font-size=\"12\">worker {worker}</text>",
            x + 30
        );
    }
    format!("<p>{}</p>\n<div class=\"layout scroll\">{svg}</svg></div>\n", escaped(&words))
}

fn open(width: usize, height: usize, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\"><title>{}</title>",
        escaped(title)
    )
}

/// Returns the drawing of a mesh.
fn svg(mesh: Mesh) -> String {
    let sizes = [mesh.pipeline, mesh.replica, mesh.shard, mesh.tensor];
    let [stages, replicas, shards, slices] =
        std::array::from_fn(|axis| sizes[axis].min(MOST[axis]));
    let (box_width, box_height) = BOX;
    let shard_width = slices * box_width + GAP;
    let replica_width = shards * shard_width + GAP;
    let row = box_height + 3 * GAP;
    let width = LEFT + replicas * (replica_width + GAP) + GAP;
    let height = TOP + stages * row + GAP;
    // Leaves room for the note.
    let mut svg = open(width.max(380), height + 20, "ranks by stage, replica, shard and slice");
    let place = |x: usize, y: usize, size: usize, anchor: &str, text: &str| {
        format!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" text-anchor=\"{anchor}\">{text}</text>"
        )
    };
    for replica in 0..replicas {
        let x = LEFT + replica * (replica_width + GAP);
        svg += &place(x + replica_width / 2, 15, 12, "middle", &format!("replica {replica}"));
        for stage in 0..stages {
            let y = TOP + stage * row;
            if replica == 0 && mesh.pipeline > 1 {
                svg += &place(4, y + row / 2 + 2, 12, "start", &format!("stage {stage}"));
            }
            let _ = write!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{replica_width}\" height=\"{}\" rx=\"5\" fill=\"none\" stroke=\"var(--line)\"/>",
                row - GAP
            );
            for shard in 0..shards {
                for slice in 0..slices {
                    let rank = ((stage * mesh.replica + replica) * mesh.shard + shard)
                        * mesh.tensor
                        + slice;
                    let left = x + GAP + shard * shard_width + slice * box_width;
                    let top = y + GAP;
                    let _ = write!(
                        svg,
                        "<rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{box_height}\" rx=\"3\" fill=\"var(--c{})\" \
                         fill-opacity=\".28\" stroke=\"var(--c{})\"><title>rank {rank}: stage {stage}, replica {replica}, shard \
                         {shard}, slice {slice}</title></rect>",
                        box_width - 2,
                        shard % 8,
                        shard % 8
                    );
                    svg += &place(left + box_width / 2, top + 17, 12, "middle", &rank.to_string());
                }
            }
        }
    }
    let hidden = sizes.iter().zip(MOST).any(|(size, most)| *size > most);
    let note = if hidden {
        "the first of each axis; boxes of one colour are the same shard"
    } else {
        "boxes of one colour are the same shard"
    };
    svg += &place(4, height + 14, 11, "start", note);
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_its_box() {
        let drawn = svg(Mesh { pipeline: 2, replica: 2, shard: 3, tensor: 2 });
        let boxes: Vec<String> = (0..24).map(|rank| format!("<title>rank {rank}: ")).collect();
        assert!(
            boxes.iter().all(|rank| drawn.contains(rank))
                && drawn.matches("<title>rank ").count() == 24
        );
        assert!(drawn.contains("rank 23: stage 1, replica 1, shard 2, slice 1"));
    }

    #[test]
    fn many_ranks_are_drawn_in_part_with_a_note() {
        let drawn = svg(Mesh { pipeline: 64, replica: 64, shard: 64, tensor: 8 });
        assert!(
            drawn.contains("the first of each axis") && drawn.len() < 1 << 19,
            "{}",
            drawn.len()
        );
    }
}
