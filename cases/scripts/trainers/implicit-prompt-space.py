"""extract_prompt (DPO, KTO, TPO, rows without a prompt): texts that differ from their first letter on, of which chosen ends with a
space. It looks at the letter before the first one, chosen[-1]: the prompt is chosen, and the chosen completion a space.
"""

from trl import extract_prompt

bad = False
print("| chosen | rejected | found | right |\n|---|---|---|---|")
for chosen in ("blue", "blue "):
    row = {"chosen": chosen, "rejected": "green"}
    found, right = extract_prompt(row), {"prompt": "", **row}
    bad |= found != right
    print(f"| {chosen!r} | 'green' | {found} | {right} |")
raise SystemExit(int(bad))
