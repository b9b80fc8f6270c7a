//! Writes the logits behind every token of a text, to compare with other programs:
//! little-endian f32, a row of the vocabulary for each token.
//!
//! ```text
//! cargo run --release -p kv-models --example logits -- --model FOLDER_OR_GGUF \
//!     --file TEXT.txt --out LOGITS.f32
//! ```

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use kv_core::{DeviceChoice, read_f32, select_device};
use kv_models::{Model, PrefillPass};

/// Write the logits behind every token of a text
#[derive(Parser)]
struct Args {
    /// A model folder, a GGUF file, a hub id (`organisation/name`), or `needle-1m`
    #[arg(long, default_value = "needle-1m")]
    model: String,
    /// The text
    #[arg(long, value_name = "PATH")]
    file: PathBuf,
    /// Where logits go; their tokens go to `PATH.tokens`, one a line
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// auto, cpu, wgpu[:i], vulkan[:i], metal[:i] or cuda[:i]
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let text =
        std::fs::read_to_string(&args.file).with_context(|| args.file.display().to_string())?;
    let model = Model::load(&args.model, &select_device(args.device)?, None)?;
    let tokens = model.encode(&text)?;
    let llama = model.llama();
    let prefilled = llama.prefill(&[&tokens], PrefillPass::default(), &mut |_| Ok(None))?;
    let [_, count, width] = prefilled.hidden.dims();
    let logits = llama.logits(prefilled.hidden.reshape([count, width]))?;
    let bytes: Vec<u8> =
        read_f32("logits", logits)?.into_iter().flat_map(f32::to_le_bytes).collect();
    let named = || args.out.display().to_string();
    std::fs::write(&args.out, bytes).with_context(named)?;
    let mut list_path = args.out.clone().into_os_string();
    list_path.push(".tokens");
    let mut list = std::fs::File::create(list_path).with_context(named)?;
    tokens.iter().try_for_each(|token| writeln!(list, "{token}"))?;
    println!("{count} tokens, {} logits each", model.config().vocab_size);
    Ok(())
}
