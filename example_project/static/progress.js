// Moves the bars of an album's page. Without it the page reloads itself.
const run = document.querySelector("[data-progress]");

async function look() {
  try {
    const response = await fetch(run.dataset.progress, { cache: "no-store" });
    if (response.ok) {
      const progress = await response.json();
      if (progress.is_over) return location.reload(); // its pictures, its error, its buttons
      show(progress);
    }
  } catch { /* the server is away: look again later */ }
  setTimeout(look, 500);
}

function show({ status, percent, stages }) {
  run.className = `panel run ${status}`;
  run.querySelector("[data-status]").textContent = status[0].toUpperCase() + status.slice(1);
  run.querySelector("[data-percent]").textContent = percent;
  run.querySelector("[data-all]").value = percent;
  run.querySelectorAll("[data-stage]").forEach((row, number) => {
    row.className = stages[number].status;
    row.querySelector("[data-done]").textContent = stages[number].done;
    row.querySelector("progress").value = stages[number].done;
  });
}

look();
